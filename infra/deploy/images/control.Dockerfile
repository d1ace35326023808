# Control plane: Prefect workers of type kubernetes and the campaigns themselves. No GPU.
# docker build -f infra/deploy/images/control.Dockerfile -t tutti-control .
FROM python:3.11-slim-bookworm

RUN useradd --create-home --uid 10001 tutti
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
    && pip install --no-cache-dir ".[s3]" "prefect-kubernetes>=0.8,<0.9" "prefect[postgres]>=3.9,<4" \
    && mkdir -p /app/runs && chown tutti:tutti /app/runs
USER 10001:10001
ENV PYTHONUNBUFFERED=1 HOME=/home/tutti
ENTRYPOINT ["/usr/bin/env"]
CMD ["prefect", "worker", "start", "--help"]
