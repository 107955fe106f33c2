"""Small encoders in folders of Hugging Face, with a tokenizer of their own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

WORDS = list("abcdefghijklmnopqrst")
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "pad_token_id": 0,
    # sharper than by default, where attention is all but uniform
    "initializer_range": 0.2,
}


def save_model(folder: Path, name: str = "BertModel", **options: Any) -> Path:
    """Save a random model of 48 positions; one word is one token."""
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    sizes = {**SIZES, "max_position_embeddings": 48, **options}
    cls(cls.config_class(**sizes)).save_pretrained(folder)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def save_modules(folder: Path, *modules: str, **pooling: Any) -> None:
    """Add what a folder of sentence-transformers says of the modules behind the encoder."""
    kinds = ["Transformer", *modules]
    about = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"st.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(about))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def make_texts(count: int, longest: int, seed: int = 0) -> list[str]:
    """Return texts of one to so many words."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(1, longest + 1))) for _ in range(count)]
