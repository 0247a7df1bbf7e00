# Each verb first installs what is missing, into .venv. Settings: PORT, PYTHON, TORCH_INDEX (an extra package index for
# torch; none: no extra one). When it is not set, Linux gets torch without CUDA if pytorch.org can be reached.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
PORT ?= 30000
TORCH_INDEX ?=
CPU_TORCH_INDEX := https://download.pytorch.org/whl/cpu
BIN := .venv/bin
INSTALLED := .venv/.installed
PEER_PYTHON ?=
JOBS ?= 2
PEERS := sglang-router==0.3.2 aiohttp fastapi uvicorn orjson requests setproctitle

.PHONY: help serve test test-slow test-gpu test-rdma test-compose check fmt bench bench-router clean system

help:
	@echo "make serve      router on 127.0.0.1:$(PORT), one prefill and one decode node, and a first question"
	@echo "make test       the tests;  make test-slow, make test-gpu: those that take minutes, those that need a GPU"
	@echo "make test-rdma  the hand-off over RDMA verbs, without hardware: Soft-RoCE in a virtual machine (root, the first time)"
	@echo "make test-compose  images are built and deploy/compose.yaml is run, by docker (BASE_IMAGE=... to build on); images stay"
	@echo "make check      format, lint and types;  make fmt: repair the first two"
	@echo "make bench      every benchmark; results go to bench/results/"
	@echo "make bench-router: CPU time and first bytes of the router beside sglang-router and mini_lb (PEER_PYTHON=...)"
	@echo "make clean      remove caches and build outputs; .venv stays"
	@echo
	@echo "PORT=31000      where make serve listens"
	@echo "JOBS=2          processes that make test runs tests in; a file's tests stay together"
	@echo "PYTHON=...      the Python that .venv is made with, 3.11 or newer"
	@echo "TORCH_INDEX=... where the first make finds torch: a package index, or none for PyPI alone (on Linux with CUDA);"
	@echo "                by default $(CPU_TORCH_INDEX) where it can be reached"

serve: $(INSTALLED)
	@$(BIN)/tandem up --port $(PORT)

test: $(INSTALLED)
	@$(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not slow and not gpu and not rdma"

test-slow: $(INSTALLED)
	@$(BIN)/pytest -m slow

test-gpu: $(INSTALLED)
	@$(BIN)/pytest -m gpu

test-rdma: $(INSTALLED)
	@$(BIN)/python -m tests.rdma.image
	@$(BIN)/pytest tests/rdma

test-compose:
	@$(PYTHON) deploy/test_compose.py $(if $(DEBOOTSTRAP),--debootstrap)

check: $(INSTALLED)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

fmt: $(INSTALLED)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(INSTALLED)
	@$(BIN)/tandem bench --all

# PEER_PYTHON: an interpreter that has sglang-router 0.3.2, which also holds mini_lb; made here when none is named.
bench-router: $(INSTALLED)
	@peers='$(PEER_PYTHON)'; \
	if [ -z "$$peers" ]; then \
		peers=.cache/peers/bin/python; \
		[ -x $$peers ] || { $(PYTHON) -m venv .cache/peers; \
			$$peers -m pip install -q --disable-pip-version-check $(PEERS) || { rm -rf .cache/peers; exit 1; }; }; \
	fi; \
	$(BIN)/tandem bench router_cost --peer-python $$peers; \
	$(BIN)/tandem bench router_latency --peer-python $$peers

clean:
	rm -rf build dist *.egg-info .cache .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# Sets $$index. Where pip looks for wheels in a folder of this machine, nobody asks pytorch.org. SIGALRM ends a slow
# look-up of the name, which urllib's time-out does not cover.
define choose_torch_index
index='$(TORCH_INDEX)'; \
if [ -z "$$index" ] && [ "$$(uname)" = Linux ] && \
		[ -z "$$($(BIN)/python -m pip config list | grep -E 'find-links|no-index')" ]; then \
	index=$(CPU_TORCH_INDEX); \
	probe="import signal, urllib.request as r; signal.alarm(5); r.urlopen('$$index/torch/', timeout=3)"; \
	{ $(BIN)/python -c "$$probe"; } 2> /dev/null || { \
		index=none; \
		echo "make: no answer from $(CPU_TORCH_INDEX): torch comes from PyPI, with CUDA (several GB)"; \
	}; \
fi; \
[ "$$index" != none ] || index=
endef

$(INSTALLED): pyproject.toml constraints-cpu.txt | system
	@echo "Installing into .venv (a few minutes the first time)"
	@$(PYTHON) -m venv .venv
	@$(choose_torch_index); \
	$(BIN)/python -m pip install --disable-pip-version-check \
		$${index:+--extra-index-url "$$index"} -c constraints-cpu.txt -e '.[cpu,dev]'
	@touch $@

# What pip cannot install: Python's venv, and libraries without which Mooncake does not load. Root on Debian gets them;
# anybody else is told what to run.
system:
	@export PATH="$$PATH:/usr/sbin:/sbin"; missing=; \
	command -v $(PYTHON) > /dev/null || { echo "make: $(PYTHON) is missing: install Python 3.11 or newer"; exit 1; }; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: $(PYTHON) is $$($(PYTHON) -V), needed is 3.11 or newer: make PYTHON=python3.11 ..."; exit 1; }; \
	$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || missing="$$missing python3-venv"; \
	for each in libibverbs.so.1=libibverbs1 libnuma.so.1=libnuma1 libcurl.so.4=libcurl4; do \
		[ "$$(uname)" != Linux ] || ldconfig -p | grep -F "$${each%=*} " > /dev/null || missing="$$missing $${each#*=}"; \
	done; \
	[ -z "$$missing" ] && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
		apt-get update -q && apt-get install -y -q $$missing; \
	else \
		echo "make: missing on this machine:$$missing. Run:"; \
		echo "    sudo apt-get install -y$$missing"; \
		exit 1; \
	fi
