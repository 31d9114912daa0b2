# `make demo` and `make test` are the two commands of the README; each sets up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test test-all test-nccl bench lint docs clean

setup: $(VENV)/.ready

OLD_PYTHON := this is Python %d.%d, and Meshwright needs 3.11 or later: make PYTHON=python3.11

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit("$(OLD_PYTHON)" % v if v < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,tensorboard,sentencepiece]'
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy meshwright

test: setup
	$(BIN)/python -m pytest -m 'not wide'

test-all: setup
	$(BIN)/python -m pytest

# One GPU is enough, and with TRANSPORT=gloo none; SHARD=1/3 runs a third of the cases, CASES=fault/ those of that name.
TRANSPORT ?= nccl
SHARD ?= 1/1
test-nccl: setup
	$(BIN)/python -m tests.nccl --transport $(TRANSPORT) --shard $(SHARD) --json runs/nccl-suite.json $(CASES)

demo: setup
	test -f data-cache/stdlib.idx || $(BIN)/meshwright data prepare stdlib --out data-cache/stdlib --tokenizer train:2048
	rm -rf runs/demo
	$(BIN)/meshwright train examples/demo.yaml --nproc 8

docs: setup
	$(BIN)/python -m pip install --quiet '.[docs]'
	$(BIN)/python -m mkdocs build --strict

bench: setup
	$(BIN)/python benchmarks/train_step.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/recording.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/generate.py
	$(BIN)/python benchmarks/predicted_steps.py

clean:
	rm -rf $(VENV)
