"""Convert a pretrained language model and see what is left of its perplexity.

    python examples/surgery_smollm2.py --out docs/results          # all of it, about an hour
    python examples/surgery_smollm2.py --quick --out /tmp/smollm2  # one mechanism, few tokens

SmolLM2-135M-Instruct (30 layers, 576 wide, 9 heads, rotary positions) on WikiText-2. Measured on
the first tokens of the test split, cut into sequences of 512: perplexity of the original, of each
conversion without training, and after distillation on the training split: output maps in closed
form, then layer by layer, then end to end on the original's predictions. Also time, memory and the
size of the decoding state.
"""

import argparse
import copy
import math
from functools import partial
from typing import Any

import torch
from pretrained import ROOT, Rows, chunks, measure, showcase, smollm2, wikitext, write_rows
from torch.nn.functional import cross_entropy

from primal_attention.output import hardware, markdown_table
from primal_attention.surgery import SurgeryConfig, convert
from primal_attention.surgery.distillation import DistillConfig, distill
from primal_attention.surgery.generation import cache_numel

MECHANISMS: dict[str, dict[str, Any]] = {
    "skyformer-learned": {"num_landmarks": 64, "window": 64},
    "gaussian": {},
    "favor": {},
    "kernelized": {},
    "kernelized-log": {},
    "schoenbat": {},
    "linear": {},
    "cosformer": {},
    "flow": {},
    "primal-dual": {"rank": 64},
    "primal": {"rank": 32},
    "primal-static": {"rank": 32},
}
LAYERS = {"last layer": "last:1", "half": "last:15", "all": "all"}
TRAINED = ("flow", "primal-dual")
"""Mechanisms that get the training budget: the best without it, and ours."""
STEPS = (24, 12)
"""The budget: steps layer by layer and end to end, one sequence of 256 tokens each."""
HELD = 2
"""Held-out sequences of 512 tokens."""
LENGTHS = (512, 4096, 16384)


@torch.no_grad()
def perplexity(model: Any, data: list[torch.Tensor]) -> float:
    """Return the perplexity of the next token, over all sequences together."""
    total, count = 0.0, 0
    for ids in data:
        logits = model(ids, use_cache=False).logits[0, :-1].float()
        total += float(cross_entropy(logits, ids[0, 1:], reduction="sum"))
        count += len(logits)
    return math.exp(total / count)


def quality(args: argparse.Namespace, rows: Rows) -> None:
    """Add the rows of every conversion that is not there yet, writing after each."""
    model, tokenizer = smollm2()
    held_ids = tokenizer(wikitext("test")[:40_000], return_tensors="pt").input_ids[0]
    held = list(chunks(held_ids, 64 if args.quick else 512, 1 if args.quick else HELD))
    train_ids = tokenizer(wikitext("train")[:400_000], return_tensors="pt").input_ids[0]
    train = [{"input_ids": ids} for ids in chunks(train_ids, 32 if args.quick else 256, 256)]
    todo: list[tuple[str, str, str]] = [("original", "none", "none")]
    names, layers = list(MECHANISMS), dict(LAYERS)
    if args.quick:
        names, layers = [TRAINED[0]], {"last layer": "last:1"}
    todo += [(name, label, "none") for label in layers for name in names]
    todo += [(name, label, "distilled") for label in layers for name in names if name in TRAINED]
    for name, label, training in todo:
        if any(
            (r["attention"], r["layers"], r["training"]) == (name, label, training) for r in rows
        ):
            continue
        torch.manual_seed(0)
        student, spent = copy.deepcopy(model), 0.0
        if name != "original":
            convert(student, SurgeryConfig(name, MECHANISMS[name], layers=layers[label]))
        if training == "distilled":
            config = DistillConfig(
                fit_batches=2 if args.quick else 4,
                layer_steps=1 if args.quick else STEPS[0],
                end_steps=1 if args.quick else STEPS[1],
                save_every=4,
            )
            folder = f"smollm2-{name}-{layers[label].replace(':', '-')}"
            where = (args.out if args.quick else ROOT / "outputs") / folder
            spent = distill(student, model, train, config, folder=where).seconds
        row = {"attention": name, "layers": label, "training": training}
        row |= {"perplexity": f"{perplexity(student, held):.4g}", "cpu seconds": round(spent)}
        rows.append(row)
        print(row, flush=True)
        write_rows(args.out / "surgery_smollm2.csv", rows)


def fill(model: Any, ids: torch.Tensor, sizes: list[int]) -> None:
    """Read a sequence and note how many numbers the cache holds after it."""
    sizes.append(cache_numel(model(ids).past_key_values))


@torch.no_grad()
def speed(args: argparse.Namespace, rows: Rows) -> None:
    """Add time, memory and size of the cache of the whole model, writing after each."""
    model = smollm2()[0].model  # without the head, which would need more than all of it
    names = ["softmax", "skyformer-learned", "favor", "linear", "primal-dual", "primal"]
    done = [(r["attention"], int(r["tokens"])) for r in rows]
    for name in names[:2] if args.quick else names:
        student = copy.deepcopy(model)
        if name != "softmax":
            convert(student, SurgeryConfig(name, MECHANISMS[name]))
        for length in LENGTHS[:1] if args.quick else LENGTHS:
            if (name, length) in done:
                continue
            ids = torch.randint(0, model.config.vocab_size, (1, length))
            sizes: list[int] = []
            row = {"attention": name, "tokens": length} | measure(
                partial(fill, student, ids, sizes)
            )
            rows.append(row | {"numbers in cache": sizes[0]})
            print(rows[-1], flush=True)
            write_rows(args.out / "surgery_smollm2_speed.csv", rows)


def summary(quality_rows: Rows, speed_rows: Rows) -> str:
    machine = hardware()
    header = ["attention", "layers", "training", "perplexity", "cpu seconds"]
    table = markdown_table(header, [[r[h] for h in header] for r in quality_rows])
    columns = ["attention", "tokens", "seconds", "MB", "numbers in cache"]
    quick = markdown_table(columns, [[r[c] for c in columns] for r in speed_rows])
    return (
        "### A converted language model\n\n"
        f"SmolLM2-135M-Instruct on WikiText-2: perplexity of the first {HELD * 512:,} tokens of "
        f"the test split (its marks of tokenization taken out), {HELD} sequences of 512. "
        f"Distilled: output maps in closed form on 4 sequences, then {STEPS[0]} steps layer by "
        f"layer and {STEPS[1]} end to end on the original's predictions, one sequence of 256 "
        "training tokens a step, one seed, no labels. Made by `python examples/surgery_smollm2.py "
        f"--out docs/results` ({machine['cpu']}, one thread, torch {machine['torch']})."
        f"\n\n{table}\n\n"
        "#### Time and memory\n\nAll 30 layers, converted, without the head: forward of one "
        "sequence that fills the cache, processor time of one thread, freed memory kept for "
        f"reuse, and what the cache holds after it.\n\n{quick}\n"
    )


if __name__ == "__main__":
    showcase("surgery_smollm2", __doc__, quality, speed, summary)
