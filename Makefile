# `make train` and `make test` need Python 3.11 and make, and set up the rest themselves.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The CPU build of torch. On a GPU machine: make TORCH="torch" (or the build that fits its CUDA).
TORCH ?= torch==2.13.0
CAMPAIGN ?= flows/campaigns/laptop.yaml
ARGS ?=

.PHONY: train test test-fast lint bench setup clean

train: setup
	$(BIN)/python -m flows.campaign $(CAMPAIGN) $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

test-fast: setup
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup .venv-trl/ready
	$(BIN)/python -m tests.bench.run --trl-python .venv-trl/bin/python $(ARGS)

setup: $(VENV)/ready

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check $(TORCH)
	$(BIN)/pip install -q --disable-pip-version-check -e ".[environments,test,dev]"
	touch $@

# TRL needs another transformers, so it gets an environment of its own.
.venv-trl/ready:
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/pip install -q --disable-pip-version-check $(TORCH)
	.venv-trl/bin/pip install -q --disable-pip-version-check "trl>=1.16,<1.17" datasets accelerate
	touch $@

clean:
	rm -rf $(VENV) .venv-trl
