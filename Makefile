# Everything from a bare machine: Python >= 3.11 and make. `make demo` and `make test` are the two doors.
#
#   PYTHON=python3.12   the interpreter that makes the environment
#   VENV=.venv          where the environment lies
#   EXTRAS=cpu,dev      what is installed with the project; on a CUDA machine: EXTRAS=gpu,dev
#   JOBS=2              test processes side by side; each test file stays in one of them
#   PYTEST_ARGS=...     added to pytest's command line

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= cpu,dev
JOBS ?= 2
PYTEST_ARGS ?=

comma := ,
space := $(subst ,, )
BIN := $(VENV)/bin
STAMP := $(VENV)/.harvest-env-$(subst $(comma),-,$(EXTRAS))

# uv reads none of pip's settings, so where pip is told to look is handed on to it.
ifneq ($(strip $(PIP_FIND_LINKS)),)
export UV_FIND_LINKS ?= $(subst $(space),$(comma),$(strip $(PIP_FIND_LINKS)))
endif
ifneq ($(strip $(PIP_INDEX_URL)),)
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
ifneq ($(strip $(PIP_EXTRA_INDEX_URL)),)
export UV_INDEX ?= $(PIP_EXTRA_INDEX_URL)
endif

.PHONY: help env demo test check slow chaos gpu bench clean

help:
	@echo "make demo    make the environment, get a small real model, harvest real text into out/demo"
	@echo "make test    make the environment, run the static checks and the tests"
	@echo "make env     make the environment only ($(VENV))"
	@echo "make check   ruff, mypy and import-linter"
	@echo "make slow    the tests that take minutes: two ranks, compiling, memory, long stalls"
	@echo "make chaos   the tests that kill processes at random moments"
	@echo "make gpu     the tests that need a CUDA device (EXTRAS=gpu,dev)"
	@echo "make bench   the benchmarks: ratios within one run"
	@echo "make clean   remove out/ and every cache; the environment stays"

env: $(STAMP)

# Every engine is a process that imports vLLM, which takes two to three times as long without compiled bytecode.
# The vLLM build for CPUs wants a `+cpu` build of torch. Where no configured place has one, uv's own setting finds it.
$(STAMP): pyproject.toml
	@for python in $(PYTHON) python3.13 python3.12 python3.11; do \
	  if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null; then break; fi; python=; \
	done; \
	if [ -z "$$python" ]; then echo "Harvest needs Python 3.11 to 3.14 and finds none. Try: make PYTHON=/path/to/python3.12" >&2; exit 1; fi; \
	test -x $(BIN)/python || $$python -m venv $(VENV)
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet uv
	@install=( $(BIN)/uv pip install --compile-bytecode --python $(BIN)/python --editable '.[$(EXTRAS)]' ); \
	if ! "$${install[@]}" --quiet --dry-run 2>/dev/null; then install+=( --torch-backend $(if $(findstring gpu,$(EXTRAS)),auto,cpu) ); fi; \
	echo "$${install[*]}"; "$${install[@]}"
	@rm -f $(VENV)/.harvest-env-*
	@touch $@

demo: env
	$(BIN)/harvest models get smollm2-135m
	$(BIN)/python -m harvest.demo_text out/demo-text.jsonl
	$(BIN)/harvest run configs/demo.toml

test: check
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=10 $(PYTEST_ARGS)

check: env
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

slow: env
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

gpu: env
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

chaos: env
	$(BIN)/python -m pytest -m chaos $(PYTEST_ARGS)

bench: env
	$(BIN)/python -m pytest -m bench -s $(PYTEST_ARGS)

clean:
	rm -rf out dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find harvest actors storage tests -type d -name __pycache__ -prune -exec rm -rf {} +
