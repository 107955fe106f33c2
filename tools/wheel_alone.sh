#!/usr/bin/env bash
# The product without the studies: build the wheel, install it in an empty environment outside the
# checkout, print help, train a table, predict, convert a model, and ask for a study.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"$root/.venv/bin/python" -m pip wheel --quiet --no-deps --wheel-dir "$place" "$root"
wheel=$(ls "$place"/primal_attention-*.whl)
"${PYTHON:-python3}" -m venv "$place/env"
"$place/env/bin/pip" install --quiet --constraint "$root/constraints.txt" torch
"$place/env/bin/pip" install --quiet --constraint "$root/constraints.txt" \
  "${wheel}[cli,train,analysis,tables,sklearn,hf]"
cp "$root/examples/write_data.py" "$place"
cd "$place"
export PATH="$place/env/bin:$PATH"
unset PYTHONPATH PRIMAL_DATA

primal --help >/dev/null
python write_data.py
primal train houses.csv --target price --training.epochs 1 --training.min-steps 4 --model.dim 16
primal predict outputs/houses houses.csv --out prices.csv
test -s prices.csv && test -s outputs/houses/report.html

# a small encoder in the format of Hugging Face, with a tokenizer of a few words
python - <<'PYTHON'
from pathlib import Path

from transformers import BertConfig, BertModel, BertTokenizerFast

words = "the cat sat on mat and a dog ran in park with red ball".split()
Path("vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
BertTokenizerFast("vocab.txt").save_pretrained("bert")
sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
BertModel(BertConfig(vocab_size=5 + len(words), **sizes)).save_pretrained("bert")
lines = [" ".join(words[i % 14] for i in range(j, j + 40)) for j in range(8)]
Path("texts.txt").write_text("\n".join(lines))
PYTHON
primal convert bert --out converted --data texts.txt --to linear --layers all --samples 8 --length 128
test -s converted/report.html

# a study: one sentence, exit code 1, no traceback
if primal bench layers >said.txt 2>&1; then echo "primal bench ran without the studies"; exit 1; fi
cat said.txt
grep -q primal-attention-studies said.txt
! grep -q Traceback said.txt
echo "wheel: $("$root/.venv/bin/python" -m zipfile -l "$wheel" | grep -c "\.py ") Python files; all steps passed"
