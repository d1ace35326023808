# Built by `lithops runtime build` in the checkout, which puts lithops_k8s.zip there.
FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends unzip redis-server curl \
    && rm -rf /var/lib/apt/lists/*
COPY infra/deploy/serverless/requirements.txt /tmp/requirements.txt
RUN pip install --no-cache-dir -r /tmp/requirements.txt \
        flask boto3 redis requests PyYAML pika cloudpickle kubernetes ps-mem tblib psutil
RUN groupadd -g 1000 lithops && useradd -m -u 1000 -g 1000 lithops
WORKDIR /lithops
ENV PYTHONPATH=/lithops PYTHONUNBUFFERED=TRUE
COPY lithops_k8s.zip .
RUN unzip -q lithops_k8s.zip && rm lithops_k8s.zip
COPY infra infra
COPY blocks blocks
COPY tasks tasks
RUN chown -R lithops:lithops /lithops
USER 1000:1000
