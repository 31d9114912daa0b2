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
	$(BIN)/mypy meshwright/layout meshwright/config meshwright/plan meshwright/pipeline/{table,schedules,verify,simulate,draw}.py

test: setup
	$(BIN)/python -m pytest -m 'not wide'

test-all: setup
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV)
