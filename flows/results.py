"""Where Prefect keeps the results of flows, and as what: JSON, with the run, never a pickle.

Prefect pickles results by default, and what lies in a shared store would be unpickled by whoever reads it.
So every flow and task of Tutti that may keep a result names `JSON`, and none reads one back: a record says
itself how to read it, so each gets a key that nothing has had before.
"""

import hashlib
from typing import Any
from uuid import uuid4

from prefect.cache_policies import CacheKeyFnPolicy
from prefect.context import TaskRunContext
from prefect.filesystems import RemoteFileSystem
from prefect.serializers import JSONSerializer

from tasks.run_folder import RunFolder

JSON = JSONSerializer(object_encoder="pydantic_core.to_jsonable_python", object_decoder=None)
"""Data classes and models become plain objects. Without a decoder no name in a result is ever imported."""


async def kept_results(folder: RunFolder) -> dict[str, Any]:
    """Options (`Task.with_options`) of a task whose result is kept as `<run>/results/<task>-<id>`.

    The storage is a Prefect block of `stores.root` without credentials: these are in the environment. Where
    that is no URL of a remote store there are no options.
    """
    if folder.files_url is None or "://" not in folder.files_url:
        return {}
    root, _, run = folder.files_url.rpartition("/")
    storage = RemoteFileSystem(basepath=root)
    await storage.asave(f"tutti-results-{hashlib.sha256(root.encode()).hexdigest()[:8]}", overwrite=True)

    def key(context: TaskRunContext, _: dict[str, Any]) -> str:
        return f"{run}/results/{context.task.name}-{uuid4().hex}"

    return {
        "persist_result": True,
        "result_storage": storage,
        "result_serializer": JSON,
        "cache_policy": CacheKeyFnPolicy(cache_key_fn=key),
    }
