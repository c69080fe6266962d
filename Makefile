PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

export OMP_NUM_THREADS = 1
unexport PYTHONDONTWRITEBYTECODE  # without compiled files, each process of the tests compiles all modules again

.PHONY: install lint types quick test golden demo peers models bench gpu clean

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

# What needs neither processes nor compilers: the inner loop.
quick: lint types
	$(BIN)/pytest -q -n auto --maxprocesses 8 --dist loadfile -m 'not distributed and not compiles and not slow'

test: lint types
	$(BIN)/pytest -q -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

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
	$(BIN)/python benchmarks/gpu.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -prune -exec rm -rf {} +
