"""vLLM's worker processes without spinning, for cores that everything shares. Runs in the vLLM environment.

vLLM's processes wait for each other's messages by `sched_yield` in a loop. Where they share their cores with
the API server, the kernel then lets that server wait for seconds: a pause came 3,800 tokens late.
To import this module, which vLLM does in the engine core's process and in every worker's by the names of the
classes below, makes that process sleep a moment instead.
"""

import time

from vllm.distributed.device_communicators import shm_broadcast
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from tasks.rollout.engines.vllm.worker_extension import PublishedWeights

_NAP_S = 20e-6

shm_broadcast.sched_yield = lambda: time.sleep(_NAP_S)  # no option of vLLM's sets it


class PatientExecutor(MultiprocExecutor):
    """A process a worker."""


class PatientPublishedWeights(PublishedWeights):
    """The worker extension of such a process."""
