# CPU pool: environments in Dask workers, rewards, pool hosts of the pool `cpu`.
# docker build -f infra/deploy/images/environment.Dockerfile -t tutti-environment .
FROM python:3.11-slim-bookworm

RUN useradd --create-home --uid 10001 tutti
WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY infra infra
COPY blocks blocks
COPY tasks tasks
COPY flows flows
COPY prefect.yaml ./
ARG TORCH=torch==2.13.0
# hadolint ignore=DL3013
RUN pip install --no-cache-dir "${TORCH}" \
    && pip install --no-cache-dir ".[environments,s3]" \
    && mkdir -p /app/runs && chown tutti:tutti /app/runs
USER 10001:10001
ENV PYTHONUNBUFFERED=1 HOME=/home/tutti OMP_NUM_THREADS=1
ENTRYPOINT ["/usr/bin/env"]
CMD ["dask", "worker", "--help"]
