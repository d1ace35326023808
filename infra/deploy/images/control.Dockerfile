# Control plane: Prefect workers of type kubernetes and the campaigns themselves. No GPU.
# docker build -f infra/deploy/images/control.Dockerfile -t tutti-control .
FROM python:3.11-slim-bookworm

# Of Mooncake's client, by which a campaign knows whether its weight store is alive.
# The versions are those of the base image's distribution, which the base image's tag pins.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libibverbs1 librdmacm1 libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 tutti
WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY infra infra
COPY blocks blocks
COPY tasks tasks
COPY flows flows
COPY prefect.yaml ./
# The CPU build of torch: pass the index that has it where the default one gives a CUDA build.
ARG TORCH=torch==2.13.0
# hadolint ignore=DL3013
RUN pip install --no-cache-dir "${TORCH}" \
    && pip install --no-cache-dir ".[s3,mooncake]" "prefect-kubernetes>=0.8,<0.9" "prefect[postgres]>=3.9,<4" \
    && mkdir -p /app/runs && chown tutti:tutti /app/runs
USER 10001:10001
ENV PYTHONUNBUFFERED=1 HOME=/home/tutti
ENTRYPOINT ["/usr/bin/env"]
CMD ["prefect", "worker", "start", "--help"]
