# Built by `lithops runtime build` in the checkout, which puts lithops_knative.zip there.
FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends unzip && rm -rf /var/lib/apt/lists/*
COPY infra/deploy/serverless/requirements.txt /tmp/requirements.txt
RUN pip install --no-cache-dir -r /tmp/requirements.txt \
        gunicorn flask gevent boto3 redis requests PyYAML pika cloudpickle kubernetes ps-mem tblib psutil
WORKDIR /lithops
ENV PYTHONPATH=/lithops PORT=8080 CONCURRENCY=1 TIMEOUT=600 PYTHONUNBUFFERED=TRUE
COPY lithops_knative.zip .
RUN unzip -q lithops_knative.zip && rm lithops_knative.zip
COPY infra infra
COPY blocks blocks
COPY tasks tasks
CMD exec gunicorn --bind :$PORT --workers $CONCURRENCY --timeout $TIMEOUT lithopsproxy:proxy
