# GPU pool of training (train-gpu): torch, FSDP2 and Megatron-core; the same image holds a Mooncake store.
# docker build -f infra/deploy/images/training.Dockerfile -t tutti-training .
FROM nvidia/cuda:12.9.1-devel-ubuntu24.04

# The versions are those of the base image's distribution, which the base image's tag pins.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv python3-dev build-essential \
       libibverbs1 librdmacm1 libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 tutti
WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY infra infra
COPY blocks blocks
COPY tasks tasks
COPY flows flows
COPY prefect.yaml ./
# On Linux the default index has torch's CUDA build.
ARG TORCH=torch==2.13.0
ARG MEGATRON=megatron-core==0.16.1
RUN python3 -m venv /opt/tutti \
    && /opt/tutti/bin/pip install --no-cache-dir "${TORCH}" \
    && /opt/tutti/bin/pip install --no-cache-dir ".[s3]" "${MEGATRON}" mooncake-transfer-engine \
    && mkdir -p /app/runs && chown tutti:tutti /app/runs
USER 10001:10001
ENV PATH=/opt/tutti/bin:$PATH PYTHONUNBUFFERED=1 HOME=/home/tutti HF_HUB_OFFLINE=1
ENTRYPOINT ["/usr/bin/env"]
CMD ["python", "-m", "prefect", "--help"]
