# Built by `lithops runtime build` in the checkout, which puts lithops_aliyun_fc.zip there.
FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends unzip && rm -rf /var/lib/apt/lists/*
COPY infra/deploy/serverless/requirements.txt /tmp/requirements.txt
RUN pip install --no-cache-dir -r /tmp/requirements.txt \
        gunicorn flask gevent oss2 redis requests PyYAML pika cloudpickle ps-mem tblib psutil
WORKDIR /function
ENV PYTHONPATH=/function CAPort=9000
COPY lithops_aliyun_fc.zip .
RUN unzip -q lithops_aliyun_fc.zip && rm lithops_aliyun_fc.zip
COPY infra infra
COPY blocks blocks
COPY tasks tasks
CMD exec gunicorn --bind 0.0.0.0:${CAPort} --workers 1 --timeout 600 --keep-alive 95 container_entry_point:app
