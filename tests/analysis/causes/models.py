"""Small models of transformers with a tokenizer of twenty words, made without any file."""

import random

import pytest
import torch

transformers = pytest.importorskip("transformers")

WORDS = [
    "the",
    "a",
    "film",
    "plot",
    "cast",
    "was",
    "is",
    "not",
    "very",
    "good",
    "great",
    "fun",
    "bad",
    "dull",
    "poor",
    "boring",
    "and",
    "but",
    "it",
    "i",
]
GOOD, BAD = {"good", "great", "fun"}, {"bad", "dull", "poor", "boring"}
_SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def tokenizer(folder):
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "##s", "##y"]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    return transformers.BertTokenizer(str(folder / "vocab.txt"))


def bert(kind="BertForSequenceClassification", seed=0, **options):
    """Return a random BERT whose scores are spread enough to change."""
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=32, intermediate_size=48, max_position_embeddings=40, **_SIZE, **options
    )
    model = getattr(transformers, kind)(config)
    return spread(model)


def llama(seed=0):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=32,
        intermediate_size=48,
        max_position_embeddings=40,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        **_SIZE,
    )
    return spread(transformers.LlamaForCausalLM(config))


def spread(model):
    """Enlarge the small weights of a new model, so that its tokens matter."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.mul_(6.0 if "embed" in name else 4.0)
    return model.eval()


def reviews(count, seed=0):
    """Return sentences with good and bad words, and whether most of them are good."""
    generator = random.Random(seed)
    texts, labels = [], []
    while len(texts) < count:
        words = generator.choices(WORDS, k=generator.randint(4, 12))
        total = sum((w in GOOD) - (w in BAD) for w in words)
        if total:
            texts.append(" ".join(words))
            labels.append(int(total > 0))
    return texts, labels


def trained(model, words, steps=90):
    """Return a classifier of the reviews."""
    torch.manual_seed(0)
    texts, labels = reviews(32 * steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for i in range(0, len(texts), 32):
        batch = words(texts[i : i + 32], padding=True, return_tensors="pt")
        loss = model(**batch, labels=torch.tensor(labels[i : i + 32])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()
