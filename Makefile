# `make demo` and `make test` are the two commands of the README; each sets up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

# Tests start many processes. Without bytecode each would compile the package again: 0.3 s of CPU time.
unexport PYTHONDONTWRITEBYTECODE

WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest
# tests/support/order.py has the order of the files.
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: setup demo test test-all test-wide test-trust test-nccl bench lint docs clean

setup: $(VENV)/.ready

OLD_PYTHON := this is Python %d.%d, and Meshwright needs 3.11 or later: make PYTHON=python3.11

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit("$(OLD_PYTHON)" % v if v < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,tensorboard,sentencepiece]'
	touch $@

# The last step finds tests, wide ones too, whose fixtures do not exist.
lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy meshwright benchmarks examples
	$(BIN)/mypy --implicit-reexport --cache-dir .mypy_cache/tests tests
	@$(PYTEST) --setup-plan -qq -p no:xdist >.pytest-plan 2>&1 || { grep '^E ' .pytest-plan | sort -u; exit 1; }
	@rm -f .pytest-plan

test: setup
	$(PYTEST) -m 'not wide' $(PARALLEL)

# SHARD=2/6 runs the second of six parts.
test-all: setup
	$(PYTEST) $(PARALLEL) $(if $(SHARD),--shard $(SHARD))

# The wide tests of the areas that the change touches, for MINUTES; CI_BASE names the commit to compare with.
MINUTES ?= 40
test-wide: setup
	$(BIN)/python -m tests.support.areas --minutes $(MINUTES) --workers $(WORKERS)

# The quick tests ten times: in random orders, at several times since the machine's start, beside a load.
test-trust: setup
	$(BIN)/python -m tests.support.trust -- $(PARALLEL)

# One GPU is enough, and with TRANSPORT=gloo none; SHARD=1/3 runs a third of the cases, CASES=fault/ those of that name.
TRANSPORT ?= nccl
test-nccl: setup
	$(BIN)/python -m tests.nccl --transport $(TRANSPORT) $(if $(SHARD),--shard $(SHARD)) --json runs/nccl-suite.json $(CASES)

demo: setup
	test -f data-cache/stdlib.idx || $(BIN)/meshwright data prepare stdlib --out data-cache/stdlib --tokenizer train:2048
	rm -rf runs/demo
	$(BIN)/meshwright train examples/demo.yaml --nproc 8

docs: setup
	$(BIN)/python -m pip install --quiet '.[docs]'
	$(BIN)/python -m mkdocs build --strict

# Those that need neither a GPU nor data, the first against plain PyTorch, DDP, fully_shard and, where it is installed,
# DeepSpeed. BENCH=--quick only tries them. All run, whichever miss their limits; the names of those end it.
BENCHMARKS := train_step zero_stages checkpoint startup recording generate tensor_pieces host_time faults predicted_steps
bench: setup
	@failed=; for name in $(BENCHMARKS); do \
		echo "== $$name"; \
		$(BIN)/python benchmarks/$$name.py $(BENCH) || failed="$$failed $$name (exit code $$?)"; \
	done; \
	test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

clean:
	rm -rf $(VENV)
