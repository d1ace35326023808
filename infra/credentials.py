"""What opens a remote store (keys, tokens, endpoints), and the one way it travels: the environment.

A process's environment is inherited by every child that it starts (trainer, engines, vLLM's workers, local
Dask workers, evaluation), shows in no process list, log or file, and fsspec and botocore read it by
themselves, so a store is opened by its URL alone everywhere. Two sources fill it:

- the user, before the start: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_ENDPOINT_URL` ... as botocore
  reads them, or `FSSPEC_<PROTOCOL>` as fsspec does. So do machines that others start: remote Dask workers
  and the hosts of pools take them from their own environment (a Kubernetes secret, Slurm's `--export`);
- a saved Prefect block that the campaign names, by `into_environment`.
"""

import json
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from fsspec.config import conf


class CredentialsInUrl(ValueError):
    """A URL carries a password; the message does not repeat it."""


def into_environment(protocol: str, options: Mapping[str, Any]) -> None:
    """Give this process and the children it starts from now on these options of a file system.

    They are defaults, as `FSSPEC_<PROTOCOL>` (JSON) says them; options given explicitly win. Values are JSON.
    """
    name = _variable(protocol)
    present = json.loads(os.environ.get(name, "{}"))
    os.environ[name] = json.dumps({**present, **options})
    # fsspec reads the environment once, when it is imported.
    conf.setdefault(protocol, {}).update(options)


def without_credentials(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for children that run code of others and need no store."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith("FSSPEC_") and name not in _SECRET_VARIABLES
    }


def refuse_credentials(url: str) -> None:
    """Raises `CredentialsInUrl`: a URL is saved with the run and shown in logs and in Prefect."""
    parts = urlsplit(url)
    if parts.password is not None:
        raise CredentialsInUrl(
            f"a {parts.scheme} URL carries a password: give it through the environment (AWS_ACCESS_KEY_ID, "
            "AWS_SECRET_ACCESS_KEY) or a Prefect block named in stores.block"
        )


_SECRET_VARIABLES = frozenset({"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"})


def _variable(protocol: str) -> str:
    return f"FSSPEC_{protocol.upper()}"
