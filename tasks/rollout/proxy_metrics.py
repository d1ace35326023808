"""The proxy's numbers in Prometheus form, at GET /metrics."""

from collections.abc import Callable, Iterator
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tasks.rollout.proxy import LLMProxy
from tasks.rollout.worker_life import WorkerPhase

_COUNTERS = {
    "turns": "Turns answered",
    "continued_turns": "Turns that went on elsewhere with tokens kept, after their worker was lost",
    "kept_tokens": "Tokens that continued turns did not have to sample again",
}


class _ProxyCollector(Collector):
    def __init__(self, proxy: LLMProxy):
        self._proxy = proxy

    def collect(self) -> Iterator[Metric]:
        proxy = self._proxy
        gauges = {
            "policy_version": ("Policy version that is served", proxy.updates.version),
            "suspended": ("1 while turns are held for an update", int(proxy.updates.suspended)),
            "open_trajectories": (
                "Trajectories that had a turn and are not finished",
                proxy.open_trajectories,
            ),
            "held_turns": ("Turns that wait for an update, a round, or a worker", proxy.held_turns),
        }
        for name, (description, value) in gauges.items():
            yield GaugeMetricFamily(f"tutti_proxy_{name}", description, value=float(value))
        for name, description in _COUNTERS.items():
            yield CounterMetricFamily(f"tutti_proxy_{name}", description, value=float(proxy.counts[name]))
        workers = GaugeMetricFamily("tutti_proxy_workers", "Inference workers by phase", labels=["phase"])
        counts = proxy.workers_by_phase()
        for phase in WorkerPhase:
            workers.add_metric([phase.value], float(counts[phase]))
        yield workers


def metrics_route(proxy: LLMProxy) -> Callable[[web.Request], Any]:
    registry = CollectorRegistry()
    registry.register(_ProxyCollector(proxy))

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return metrics
