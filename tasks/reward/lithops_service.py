"""A function service through Lithops: start activations, and exchange objects with them through its storage.

Lithops itself pickles: it stores the (module-level) function and its arguments as pickles, and the service's
workers unpickle them, so whoever can write to its storage runs code there. Keep that storage private. Tutti's
side unpickles nothing of it: results come back as msgpack in objects of Tutti's own, and Lithops' results,
whose `result()` unpickles, are never asked for.
"""

import copy
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.reward.activation import serve
from tasks.reward.config import ServerlessConfig
from tasks.reward.mailbox import put


class ServerlessError(RuntimeError):
    """The function service cannot be used; the message names the option of `reward.serverless`."""


def lithops_config(config: ServerlessConfig, sections: Mapping[str, Any]) -> dict[str, Any]:
    """Lithops' whole configuration: of its file, then `sections` (a Prefect block's), then the campaign's.

    Raises `ServerlessError` when Lithops is missing or refuses it. Reads files, starts nothing.
    """
    try:
        from lithops.config import default_config, load_config
    except ImportError as error:
        raise ServerlessError(
            f"reward.serverless needs Lithops: pip install 'tutti[serverless]' ({error})"
        ) from error
    file = None if config.config_file is None else Path(config.config_file).expanduser()
    if file is not None and not file.is_file():
        raise ServerlessError(f"reward.serverless.config_file: there is no file {file} on this machine")
    try:
        merged: dict[str, Any] = copy.deepcopy(load_config(None if file is None else str(file), log=False))
        for more in (sections, config.config):
            _merge(merged, more)
        lithops = merged.setdefault("lithops", {})
        lithops.pop("mode", None)  # it follows from the back end
        lithops["backend"] = config.backend
        if config.storage is not None:
            lithops["storage"] = config.storage
        elif config.backend == "localhost":
            lithops["storage"] = "localhost"
        elif lithops.get("storage") == "localhost":
            del lithops["storage"]
        lithops["data_cleaner"] = False  # what an activation leaves is deleted by `LithopsService.close`
        if config.backend == "localhost":
            section = merged.setdefault("localhost", {})
            section.setdefault("runtime", sys.executable)
            section["worker_processes"] = config.activations
        complete: dict[str, Any] = default_config(config_data=merged)
    except ImportError as error:
        raise ServerlessError(
            f"the client of {config.backend} or of its storage is not installed here ({error}): "
            "pip install the extra of Lithops that reward.serverless.backend names, for example lithops[aws]"
        ) from error
    except Exception as error:
        raise ServerlessError(
            f"Lithops refuses the configuration of {config.backend}: {error}. Change "
            "reward.serverless.config, config_file or block; infra/deploy/serverless/ has a page a service"
        ) from error
    return complete


class LithopsService:
    """One Lithops executor. Methods block, and may be called from threads, `invoke` from one at a time."""

    def __init__(self, config: ServerlessConfig, sections: Mapping[str, Any], memory_mb: int):
        """Raises `ServerlessError`. Starts no activation."""
        complete = lithops_config(config, sections)
        from lithops import FunctionExecutor

        self._memory_mb = memory_mb
        self._limit_s = int(config.life_s + 2 * config.start_limit_s)
        self._environment = {}
        if config.backend == "localhost":  # the machine's own modules, as this process finds them
            self._environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        try:
            self._executor = FunctionExecutor(config=complete, log_level=None)
        except Exception as error:
            raise ServerlessError(f"Lithops cannot use {config.backend}: {error}") from error
        self._storage = self._executor.storage
        self._bucket = self._storage.bucket

    def invoke(self, order: bytes) -> Any:
        """Start an activation; returns what `failed` takes. Raises whatever the service's client raises."""
        return self._executor.call_async(
            serve,
            {"order": order},
            extra_env=self._environment,
            runtime_memory=self._memory_mb,
            timeout=self._limit_s,
            include_modules=None,
        )

    def failed(self, activation: Any) -> str | None:
        """Why the activation ended in failure, as far as Lithops says; None when it has not."""
        status = self._executor.internal_storage.get_call_status(
            activation.executor_id, activation.job_id, activation.call_id
        )
        if status is None or not status.get("exception"):
            return None
        return f"the activation raised before it reported; Lithops' logs say why ({activation.job_id})"

    def put(self, key: str, data: bytes) -> None:
        put(self._storage, key, data)

    def list_keys(self, prefix: str) -> list[str]:
        return sorted(self._storage.list_keys(self._bucket, prefix))

    def get(self, key: str) -> bytes:
        data: bytes = self._storage.get_object(self._bucket, key)
        return data

    def delete(self, keys: list[str]) -> None:
        if keys:
            self._storage.delete_objects(self._bucket, keys)

    def close(self, root: str) -> None:
        """Let go of the executor (on `localhost`, kill what runs) and delete what it and `root` stored."""
        from lithops.constants import JOBS_PREFIX

        self._executor.__exit__(None, None, None)
        for prefix in (f"{root}/", f"{JOBS_PREFIX}/{self._executor.executor_id}"):
            self.delete(self.list_keys(prefix))


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = copy.deepcopy(value)
