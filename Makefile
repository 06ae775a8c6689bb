# Two commands: `make demo` and `make test`. Each builds the virtual environment on a machine that has only Python.
# Beside them: `make quick` (two minutes), `make doctests`, `make lint`, `make types`, `make processors`, `make package`,
# `make clean`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SHELL := /bin/bash

.PHONY: demo example test quick doctests docs links lint types processors package clean

# Where Python is told to keep no bytecode, every process that a test starts would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

PYRIGHT := $(BIN)/pyright --pythonpath $(BIN)/python

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,peers,trainers]'
	touch $@

# What the demo needs and no more. This index has torch for processors alone (0.2 GB in the place of 3); where it does not
# answer, torch is what the package index has.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PIP = $(BIN)/python -m pip install --progress-bar off --no-compile --constraint constraints.txt

$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch (for processors alone, where $(TORCH_INDEX) answers) and the extra demo into $(VENV)"
	@date +%s > $@.began
	-$(PIP) --no-deps --retries 0 --timeout 20 --index-url $(TORCH_INDEX) torch
	$(PIP) torch
	$(PIP) --editable '.[demo]'
	@echo "installed in $$(( $$(date +%s) - $$(cat $@.began) )) seconds"
	@mv $@.began $@

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py

# The table of docs/howto/digits.md.
example: $(VENV)/.installed
	$(BIN)/python examples/digits.py > docs/howto/digits_table.md

PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

test: $(VENV)/.installed
	$(MAKE) --jobs 2 lint types doctests
	$(PYTEST) tests

# What `pytest` alone runs.
quick: $(VENV)/.installed
	$(BIN)/python -m pytest

# Every example of a docstring and of the pages.
doctests: $(VENV)/.installed
	$(PYTEST) --doctest-modules --doctest-glob=*.md bayesopt_chain README.md docs

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: $(VENV)/.installed
	$(PYRIGHT)

# The suite as other processors run it, with one thread and with two: torch picks its kernels by what the processor can do, and
# MKL its own; both can be told to pretend, as far as this processor goes. What torch compiles is kept apart for each: its cache
# does not know the capability and hands out code for another. PYTEST_ARGS narrows it down.
processors: $(VENV)/.installed
	set -e; for kernels in default:COMPATIBLE:fpu avx2:AVX2:avx2 avx512:AUTO:avx512f; do \
	    IFS=: read capability order flag <<< $$kernels; grep -qw $$flag /proc/cpuinfo || continue; cache=$$(mktemp -d); \
	    for threads in 1 2; do \
	        echo "$$capability, $$threads thread(s)"; \
	        ATEN_CPU_CAPABILITY=$$capability MKL_CBWR=$$order OMP_NUM_THREADS=$$threads TORCHINDUCTOR_CACHE_DIR=$$cache \
	            $(BIN)/python -m pytest -q -n $$(( ($$(nproc) + threads - 1) / threads )) $(or $(PYTEST_ARGS),tests); \
	    done; rm -r $$cache; \
	done

# The wheel and the source archive, checked; `python -m tests.release` says what is left to do before they are uploaded.
package: $(VENV)/.installed
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	PATH=$(BIN):$$PATH $(BIN)/python -m tests.manylinux dist
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/pyroma --min 10 .

docs: $(VENV)/.installed
	$(BIN)/python -m tests.site docs/_build

# Every address outside, asked for; needs the internet.
links: $(VENV)/.installed
	$(BIN)/python -m sphinx -q -b linkcheck docs docs/_build/links

# Executed in place, outputs kept, and those whose data or packages are absent named; BAYESOPT_CHAIN_SCALE=smoke for a quick look,
# which keeps nothing, BAYESOPT_CHAIN_DATA for the data sets.
notebooks: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[notebooks,benchmarks]'
	$(BIN)/python -m tests.notebooks

clean:
	rm -rf $(VENV) docs/_build docs/api docs/notebooks docs/jupyter_execute docs/results.md build *.egg-info .pytest_cache .ruff_cache .hypothesis .grimp_cache .import_linter_cache
