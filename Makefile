# `make demo` and `make test` do all set-up themselves. Everything lives in .venv and in the cache folder of `capt`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := $(wildcard capt_kernels/csrc/*) CMakeLists.txt setup.py pyproject.toml constraints.txt

.PHONY: setup demo test test-transformers bench lint clean

setup: $(STAMP)

# torch goes first and alone: what comes after must build against it and must not replace it.
$(STAMP): $(SOURCES)
	@echo "setting up $(VENV): about four minutes and 3 GB"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt setuptools wheel cmake ninja
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e '.[train,bench,triton,dev]'
	$(BIN)/capt backends
	touch $@

demo: setup
	$(BIN)/capt demo

# Small tests: a worker a core beats two threads a test.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest tests -n auto

# The oldest and the newest transformers that work, each in a folder in front of the installed one.
UNCONCERNED := assets cli compile config demo memory real_weights tasks training_config training_inference training_recipe
OTHERS := 5.17.0 5.24.0
build/transformers-5.17.0: NEEDS := huggingface_hub==1.33.0 httpx==0.28.1 httpcore==1.0.9
build/transformers-%: | setup
	rm -rf $@.part
	$(BIN)/pip install --quiet --no-deps --target $@.part transformers==$* $(NEEDS)
	mv $@.part $@

# What runs a base or a Trainer, but for torch.compile, which is slow.
test-transformers: $(OTHERS:%=build/transformers-%)
	for version in $(OTHERS); do \
		export OMP_NUM_THREADS=1 PYTHONPATH="$(CURDIR)/build/transformers-$$version"; \
		$(BIN)/python -c "import transformers as t; assert t.__version__ == '$$version', t; print(t.__name__, '$$version')" && \
		$(BIN)/pytest tests/capt -n auto -q $(patsubst %,--ignore=tests/capt/test_%.py,$(UNCONCERNED)) || exit 1; \
	done

bench: setup
	$(BIN)/pytest benchmarks --benchmark-only --benchmark-json=bench.json
	$(BIN)/python -m benchmarks.report bench.json

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info capt_kernels/_C*.so .pytest_cache .mypy_cache .ruff_cache
