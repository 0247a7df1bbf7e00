# Each verb first installs what is missing, into .venv. Settings: PORT, PYTHON, TORCH_INDEX (an extra package index for
# torch, e.g. https://download.pytorch.org/whl/cpu).
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
PORT ?= 30000
TORCH_INDEX ?=
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: help serve test test-slow test-gpu check fmt bench clean system

help:
	@echo "make serve      router on 127.0.0.1:$(PORT), one prefill and one decode node, and a first question"
	@echo "make test       the tests;  make test-slow, make test-gpu: those that take minutes, those that need a GPU"
	@echo "make check      format, lint and types;  make fmt: repair the first two"
	@echo "make bench      every benchmark; results go to bench/results/"
	@echo "make clean      remove caches and build outputs; .venv stays"

serve: $(INSTALLED)
	@$(BIN)/tandem up --port $(PORT)

test: $(INSTALLED)
	@$(BIN)/pytest -m "not slow and not gpu"

test-slow: $(INSTALLED)
	@$(BIN)/pytest -m slow

test-gpu: $(INSTALLED)
	@$(BIN)/pytest -m gpu

check: $(INSTALLED)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

fmt: $(INSTALLED)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(INSTALLED)
	@$(BIN)/tandem bench --all

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints-cpu.txt | system
	@echo "Installing into .venv (a few minutes the first time)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --disable-pip-version-check \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints-cpu.txt -e '.[cpu,dev]'
	@touch $@

# What pip cannot install: Python's venv, and libibverbs, without which Mooncake does not load. Root on Debian gets
# them; anybody else is told what to run.
system:
	@export PATH="$$PATH:/usr/sbin:/sbin"; missing=; \
	command -v $(PYTHON) > /dev/null || { echo "make: $(PYTHON) is missing: install Python 3.11 or newer"; exit 1; }; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: $(PYTHON) is $$($(PYTHON) -V), needed is 3.11 or newer: make PYTHON=python3.11 ..."; exit 1; }; \
	$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || missing="$$missing python3-venv"; \
	[ "$$(uname)" != Linux ] || ldconfig -p | grep 'libibverbs\.so\.1 ' > /dev/null || missing="$$missing libibverbs1"; \
	[ -z "$$missing" ] && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
		apt-get update -q && apt-get install -y -q $$missing; \
	else \
		echo "make: missing on this machine:$$missing. Run:"; \
		echo "    sudo apt-get install -y$$missing"; \
		exit 1; \
	fi
