# GPU pools of rollout (compute-gpu, bandwidth-gpu): vLLM, and beside it Tutti in an environment of its own,
# since the two need different versions of FastAPI. Engines are `rollout.engine: {kind: vllm, python:
# /opt/vllm/bin/python}`.
# docker build -f infra/deploy/images/rollout.Dockerfile -t tutti-rollout .
FROM nvidia/cuda:12.9.1-devel-ubuntu24.04

# The versions are those of the base image's distribution, which the base image's tag pins.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv python3-dev libibverbs1 librdmacm1 libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 tutti
# vLLM brings the CUDA build of torch that it was made for.
ARG VLLM=vllm==0.32.0
RUN python3 -m venv /opt/vllm && /opt/vllm/bin/pip install --no-cache-dir "${VLLM}" \
       fsspec msgpack mooncake-transfer-engine pyarrow s3fs uvloop xxhash zstandard
WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY infra infra
COPY blocks blocks
COPY tasks tasks
COPY flows flows
COPY prefect.yaml ./
ARG TORCH=torch==2.13.0
RUN python3 -m venv /opt/tutti \
    && /opt/tutti/bin/pip install --no-cache-dir "${TORCH}" \
    && /opt/tutti/bin/pip install --no-cache-dir ".[s3]" mooncake-transfer-engine \
    && mkdir -p /app/runs && chown tutti:tutti /app/runs
USER 10001:10001
ENV PATH=/opt/tutti/bin:$PATH PYTHONUNBUFFERED=1 HOME=/home/tutti HF_HUB_OFFLINE=1
ENTRYPOINT ["/usr/bin/env"]
CMD ["python", "-m", "prefect", "--help"]
