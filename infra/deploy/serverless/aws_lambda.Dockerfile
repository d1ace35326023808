# Built by `lithops runtime build` in the checkout, which puts lithops_lambda.zip there.
FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends unzip && rm -rf /var/lib/apt/lists/*
COPY infra/deploy/serverless/requirements.txt /tmp/requirements.txt
RUN pip install --no-cache-dir -r /tmp/requirements.txt \
        awslambdaric boto3 redis httplib2 requests PyYAML pika cloudpickle ps-mem tblib psutil
WORKDIR /function
ENV PYTHONPATH=/function
COPY lithops_lambda.zip .
RUN unzip -q lithops_lambda.zip && rm lithops_lambda.zip \
    && mkdir handler && touch handler/__init__.py && mv entry_point.py handler/
COPY infra infra
COPY blocks blocks
COPY tasks tasks
ENTRYPOINT ["/usr/local/bin/python", "-m", "awslambdaric"]
CMD ["handler.entry_point.lambda_handler"]
