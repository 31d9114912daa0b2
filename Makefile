# `make demo` and `make test` are the two commands of the README; each sets up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test test-all bench lint clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
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

demo: setup
	test -f data-cache/stdlib.idx || $(BIN)/meshwright data prepare stdlib --out data-cache/stdlib --tokenizer train:2048
	rm -rf runs/demo
	$(BIN)/meshwright train examples/demo.yaml --nproc 8

bench: setup
	$(BIN)/python benchmarks/train_step.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/generate.py
	$(BIN)/python benchmarks/predicted_steps.py

clean:
	rm -rf $(VENV)
