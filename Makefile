# `make demo` and `make test` do all set-up themselves. Everything lives in .venv and in the cache folder of `capt`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := $(wildcard capt_kernels/csrc/*) CMakeLists.txt setup.py pyproject.toml constraints.txt

.PHONY: setup demo test bench lint clean

setup: $(STAMP)

# torch goes first and alone: what comes after must build against it and must not replace it.
$(STAMP): $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt setuptools wheel cmake ninja
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e '.[train,bench,triton,dev]'
	touch $@

demo: setup
	$(BIN)/capt demo

# Small tests: a worker a core beats two threads a test.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest tests -n auto

bench: setup
	$(BIN)/pytest benchmarks --benchmark-only

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info capt_kernels/_C*.so .pytest_cache .mypy_cache .ruff_cache
