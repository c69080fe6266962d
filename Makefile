PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# Tests of several processes often wait, so there are two workers more than processors.
WORKERS := $(shell $(PYTHON) -c 'import os; print(min(8, os.cpu_count() + 2))')
PYTEST := $(BIN)/pytest -q -n $(WORKERS) --dist loadfile

export OMP_NUM_THREADS = 1
unexport PYTHONDONTWRITEBYTECODE  # without compiled files, each process of the tests compiles all modules again

.PHONY: install lint types quick test exhaustive random mutants golden demo peers models bench gpu clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make install PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,examples,plot]'
	touch $@

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: install
	$(BIN)/mypy

# What needs neither processes nor compilers, nor half a second: the inner loop.
quick: lint types
	$(PYTEST) -n auto -m 'not distributed and not compiles and not slow and not exhaustive'

test: lint types
	$(PYTEST) --no-loadscope-reorder --max-worker-restart 0 -m 'not exhaustive'

# The tests that `make test` leaves out.
exhaustive: install
	$(PYTEST) --max-worker-restart 0 -m exhaustive

# The tests of random problems, with other problems in each run.
random: install
	$(PYTEST) --hypothesis-profile random $(shell grep -rl 'from hypothesis' tests --include='test_*.py')

# Small mutations of the code, each of which the nearest tests must notice.
mutants: install
	$(BIN)/python -m pip install -c constraints.txt cosmic-ray
	$(BIN)/python -m tests.mutants

golden: install
	$(BIN)/pytest -q --update-golden

demo: install
	$(BIN)/torchrun --standalone --nproc-per-node 2 examples/demo.py

peers: install
	DS_BUILD_OPS=0 $(BIN)/python -m pip install -c constraints.txt deepspeed jax

models: install
	$(BIN)/python -m pip install -c constraints.txt -e '.[models]'

bench: install
	$(BIN)/python -m benchmarks.peers

gpu: install
	$(BIN)/python -m benchmarks.gpu

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -prune -exec rm -rf {} +
