"""Convert a pretrained sentence encoder and see what is left of its embeddings.

    python examples/surgery_minilm.py --out docs/results            # all of it, about 20 minutes
    python examples/surgery_minilm.py --quick --out /tmp/minilm     # one mechanism, one minute

all-MiniLM-L6-v2 (six layers, 384 wide, 12 heads) embeds sentences of IMDb reviews. Measured on
held-out sentences, against the embeddings of the original: the mean cosine, the share of sentences
whose nearest neighbour among the others is the same, and the overlap of their ten nearest. Training
needs no labels: sentences of the training split, first in closed form, then layer by layer, then
end to end on the hidden states.
"""

import argparse
import copy
from functools import partial
from typing import Any

import torch
from pretrained import ROOT, Rows, imdb_sentences, measure, minilm, showcase, write_rows
from torch.nn.functional import normalize

from primal_attention.output import hardware, markdown_table
from primal_attention.surgery import SurgeryConfig, convert
from primal_attention.surgery.distillation import DistillConfig, distill

MECHANISMS: dict[str, dict[str, Any]] = {
    "nystromformer": {"num_landmarks": 16, "kernel_size": None},
    "skyformer": {"num_landmarks": 16},
    "skyformer-learned": {"num_landmarks": 16},
    "gaussian": {},
    "favor": {},
    "kernelized": {},
    "kernelized-log": {},
    "schoenbat": {},
    "linear": {},
    "cosformer": {},
    "flow": {},
    "linformer": {"num_projections": 16},
    "primal-dual": {"rank": 32},
    "primal-relative": {"rank": 32},
    "primal": {"rank": 16},
}
LAYERS = {"last two": "last:2", "all": "all", "half": "last:3", "last layer": "last:1"}
TRAINED = ("nystromformer", "primal-dual")
"""Mechanisms that get the training budget."""
STEPS = (100, 50)
"""The budget: steps layer by layer and end to end, 32 sentences each."""
LENGTHS = (512, 4096, 16384)
LANDMARKS = 64
"""Landmarks where speed is measured, at lengths that need more of them."""


def batches(tokenizer: Any, sentences: list[str], size: int = 32) -> list[dict[str, torch.Tensor]]:
    return [
        dict(
            tokenizer(
                sentences[i : i + size],
                padding=True,
                truncation=True,
                max_length=64,
                return_tensors="pt",
            )
        )
        for i in range(0, len(sentences), size)
    ]


@torch.no_grad()
def embed(model: Any, data: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    found = []
    for batch in data:
        hidden, keep = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
        found.append(normalize((hidden * keep).sum(1) / keep.sum(1), dim=-1))
    return torch.cat(found)


def neighbours(embeddings: torch.Tensor, count: int) -> torch.Tensor:
    similarity = embeddings @ embeddings.T
    similarity.fill_diagonal_(-2)
    return similarity.topk(count).indices


def compare(embeddings: torch.Tensor, original: torch.Tensor) -> dict[str, float]:
    mine, theirs = neighbours(embeddings, 10), neighbours(original, 10)
    shared = (mine[:, :, None] == theirs[:, None, :]).any(-1).float().mean()
    return {
        "cosine": round(float((embeddings * original).sum(1).mean()), 4),
        "same nearest": round(float((mine[:, 0] == theirs[:, 0]).float().mean()), 3),
        "ten nearest": round(float(shared), 3),
    }


def quality(args: argparse.Namespace, rows: Rows) -> None:
    """Add the rows of every conversion that is not there yet, writing after each."""
    model, tokenizer = minilm()
    train = batches(tokenizer, imdb_sentences("train", 1024 if args.quick else 3200))
    held = batches(tokenizer, imdb_sentences("test", 96 if args.quick else 384))
    original = embed(model, held)
    names = list(MECHANISMS)[:1] if args.quick else list(MECHANISMS)
    layers = {"last two": "last:2"} if args.quick else LAYERS
    steps = (2, 2) if args.quick else STEPS
    todo = []
    for label in layers:
        todo += [(name, label, "none") for name in names]
        todo += [(name, label, "distilled") for name in names if name in TRAINED]
    for name, label, training in todo:
        if any(
            (r["attention"], r["layers"], r["training"]) == (name, label, training) for r in rows
        ):
            continue
        torch.manual_seed(0)
        student = copy.deepcopy(model)
        convert(student, SurgeryConfig(name, MECHANISMS[name], layers=layers[label]))
        spent = 0.0
        if training == "distilled":
            config = DistillConfig(
                fit_batches=8,
                layer_steps=steps[0],
                end_steps=steps[1],
                objective="hidden",
                save_every=10,
            )
            folder = f"minilm-{name}-{layers[label].replace(':', '-')}"
            where = (args.out if args.quick else ROOT / "outputs") / folder
            spent = distill(student, model, train, config, folder=where).seconds
        row = {"attention": name, "layers": label, "training": training}
        row |= compare(embed(student, held), original)
        rows.append(row | {"cpu seconds": round(spent)})
        print(rows[-1], flush=True)
        write_rows(args.out / "surgery_minilm.csv", rows)


@torch.no_grad()
def speed(args: argparse.Namespace, rows: Rows) -> None:
    """Add time and memory of the whole encoder, all layers converted, writing after each."""
    model, _ = minilm()
    # the model knows 512 positions; time does not care that the others are made up
    model = type(model)(
        type(model.config)(**{**model.config.to_dict(), "max_position_embeddings": max(LENGTHS)})
    ).eval()
    names = ["softmax", "nystromformer", "skyformer", "favor", "linear", "primal-dual", "primal"]
    done = [(r["attention"], int(r["tokens"])) for r in rows]
    for name in names[:2] if args.quick else names:
        student = copy.deepcopy(model)
        if name != "softmax":
            options = dict(MECHANISMS[name])
            if "num_landmarks" in options:
                options["num_landmarks"] = LANDMARKS
            convert(student, SurgeryConfig(name, options))
        for length in LENGTHS[:1] if args.quick else LENGTHS:
            if (name, length) in done:
                continue
            ids = torch.randint(1000, 20000, (1, length))
            rows.append({"attention": name, "tokens": length} | measure(partial(student, ids)))
            print(rows[-1], flush=True)
            write_rows(args.out / "surgery_minilm_speed.csv", rows)


def summary(quality_rows: Rows, speed_rows: Rows) -> str:
    machine = hardware()
    header = ["attention", "layers", "training", "cosine", "same nearest", "ten nearest",
              "cpu seconds"]  # fmt: skip
    table = markdown_table(header, [[r[h] for h in header] for r in quality_rows])
    columns = ["attention", "tokens", "seconds", "MB"]
    quick = markdown_table(columns, [[r[c] for c in columns] for r in speed_rows])
    return (
        "### A converted sentence encoder\n\n"
        "all-MiniLM-L6-v2 on 384 held-out sentences of IMDb (test split; 6 to 40 words), against "
        "the original's embeddings. *Same nearest*: sentences whose nearest neighbour among the "
        "other 383 is the original's; *ten nearest*: overlap of the ten nearest. Sentences have "
        "about 30 tokens, landmark methods 16 landmarks or projections. Distilled: "
        f"closed form on 8 batches, then {STEPS[0]} steps layer by layer and {STEPS[1]} end to "
        "end on hidden states, 32 training sentences a step, one seed, no labels. Made by "
        f"`python examples/surgery_minilm.py --out docs/results` ({machine['cpu']}, one thread, "
        f"torch {machine['torch']}).\n\n{table}\n\n"
        "#### Time and memory\n\nThe whole encoder, all six layers converted, one sequence, "
        "forward, processor time of one thread, freed memory kept for reuse; position table "
        f"enlarged, {LANDMARKS} landmarks.\n\n{quick}\n"
    )


if __name__ == "__main__":
    showcase("surgery_minilm", __doc__, quality, speed, summary)
