import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster

from blocks.sample_buffer import SampleBuffer
from infra.object_store import ObjectStore
from infra.rpc import RpcConnection, RpcError, RpcServer
from tasks.environment import worker as worker_module
from tasks.environment.episode import turn_seed
from tasks.environment.worker import EnvironmentWorker, close_worker, run_members
from tasks.trajectory import InfraError, MemberSpec, Reward, Skip, StopReason, TrajectoryHeader, TrajectoryKey
from tasks.trajectory_arrow import from_arrow
from tests.environment import chat

BUDGETS = {
    "max_turns": 3,
    "max_turn_tokens": 16,
    "max_tokens": 400,
    "reset_limit_s": 2.0,
    "step_limit_s": 0.5,
}
CAMPAIGN = {
    "name": "test",
    "domains": {
        "d": {"source": "tests.environment.misbehaving:Obedient", **BUDGETS},
        "judged": {
            "source": "tests.environment.misbehaving:Obedient",
            **BUDGETS,
            "max_turns": 1,
            "reward": "tests.reward.judgements:obey",
            "reward_limit_s": 0.3,
        },
        "judged_slowly": {
            "source": "tests.environment.misbehaving:Obedient",
            **BUDGETS,
            "max_turns": 1,
            "reward": "tests.reward.judgements:obey",
            "reward_limit_s": 60,
        },
    },
}


class ScriptedProxy:
    """An RPC server in the proxy's place: says, turn by turn, what the script has for a trajectory."""

    def __init__(self, script: dict[str, list[Any]]):
        self.script = script
        self.requests: list[dict[str, Any]] = []
        self.finished: list[str] = []
        self.turns: dict[str, int] = {}
        self.asked: asyncio.Queue[str] = asyncio.Queue()  # names, a turn each
        self.waiting: asyncio.Queue[str] = asyncio.Queue()  # names whose episodes are over
        self.all_over = asyncio.Event()
        handlers = {"generate": self.generate, "finish": self.finish, "episode_over": self.episode_over}
        self.server = RpcServer(handlers, token="secret")

    async def generate(self, payload: dict[str, Any], _: RpcConnection) -> dict[str, Any]:
        self.requests.append(payload)
        name = payload["trajectory"]
        self.asked.put_nowait(name)
        turn = self.turns[name] = self.turns.get(name, -1) + 1
        said = self.script[name][turn]
        if isinstance(said, RpcError):
            raise said
        if isinstance(said, float):
            await asyncio.sleep(said)
            said = "end"
        tokens = chat.ids(said + "<|im_end|>")
        length = len(tokens)
        return {
            "tokens": np.array(tokens, np.int32).tobytes(),
            "logprobs": np.full(length, -1.0, np.float32).tobytes(),
            "versions": np.full(length, 4 + turn, np.int32).tobytes(),
            "stop": "stop",
        }

    async def finish(self, payload: dict[str, Any], _: RpcConnection) -> None:
        self.finished += payload["trajectories"]

    async def episode_over(self, payload: dict[str, Any], _: RpcConnection) -> None:
        self.waiting.put_nowait(payload["trajectory"])
        await self.all_over.wait()

    async def abort(self, names: list[str], reason: str) -> None:
        await self.server.broadcast("abort", {"trajectories": names, "reason": reason})


def spec(member: int, domain: str = "d", **changes: Any) -> MemberSpec:
    return replace(MemberSpec(TrajectoryKey(5, member), domain, 7, 100 + member, 4, 0.8), **changes)


def name(member: int) -> str:
    return f"g00000005-m{member:03d}-a00"


@asynccontextmanager
async def proxied(
    directory: Path, script: dict[int, list[Any]]
) -> AsyncIterator[tuple[ScriptedProxy, dict[str, Any]]]:
    proxy = ScriptedProxy({name(member): says for member, says in script.items()})
    url = await proxy.server.start()
    model = directory / "model"
    chat.save(model)
    yield (
        proxy,
        {
            "proxy": {"url": url, "token": "secret"},
            "campaign": CAMPAIGN,
            "model": str(model),
            "samples": {"url": str(directory / "samples")},
            "topic": "ended",
        },
    )
    await proxy.server.stop()


@asynccontextmanager
async def working(
    directory: Path, script: dict[int, list[Any]], train: dict[str, Any] | None = None, **environment: Any
) -> AsyncIterator[tuple[ScriptedProxy, EnvironmentWorker]]:
    async with proxied(directory, script) as (proxy, settings):
        campaign = {**settings["campaign"], "environment": environment, "train": train or {}}
        worker = await EnvironmentWorker.start({**settings, "campaign": campaign})
        yield proxy, worker
        await worker.close()


def stored(directory: Path) -> SampleBuffer:
    return SampleBuffer(ObjectStore(str(directory / "samples")))


async def run(
    worker: EnvironmentWorker, members: list[MemberSpec], prefix: str = ""
) -> tuple[list[TrajectoryHeader], list[TrajectoryHeader]]:
    announced: list[dict[str, Any]] = []
    returned = await worker.run(members, announced.append, prefix)
    return [TrajectoryHeader.from_json(h) for h in returned], [
        TrajectoryHeader.from_json(h) for h in announced
    ]


async def test_a_member_is_played_judged_committed_announced_and_finished(tmp_path):
    async with working(tmp_path, {0: ["0.5", "0.25", "end"]}) as (proxy, worker):
        (header,), announced = await run(worker, [spec(0)])
        await asyncio.sleep(0.1)
    assert announced == [header]
    assert proxy.finished == [name(0)]
    assert header.outcome == Reward(0.75)
    assert (header.stop, header.turns, header.name) == (StopReason.TERMINATED, 3, name(0))
    assert (header.initiating_version, header.oldest_version, header.newest_version) == (4, 4, 6)
    (data,) = stored(tmp_path).get_many([(name(0), 4)])
    trajectory = from_arrow(data)
    assert trajectory.outcome == Reward(0.75)
    assert (len(trajectory.tokens), trajectory.sampled_tokens) == (header.tokens, header.sampled_tokens)
    assert [turn.action for turn in trajectory.turns] == ["0.5", "0.25", "end"]


async def test_the_proxy_is_asked_with_whole_contexts_and_seeds_of_their_own(tmp_path):
    async with working(tmp_path, {0: ["1", "end"]}) as (proxy, worker):
        proxy.script[f"eval-{name(0)}"] = ["end"]
        await run(worker, [spec(0)])
        await run(worker, [spec(0, commit=False, temperature=0.0)], prefix="eval-")
    first, second, evaluated = proxy.requests
    context = np.frombuffer(first["tokens"], np.int32).tolist()
    assert context == chat.ids("<|im_start|>user\ngo 7<|im_end|>\n<|im_start|>assistant\n")
    assert np.frombuffer(second["tokens"], np.int32).tolist()[: len(context) + 2] == [
        *context,
        *chat.ids("1<|im_end|>"),
    ]
    assert (first["seed"], second["seed"]) == (turn_seed(100, 0), turn_seed(100, 1))
    assert (first["temperature"], first["max_new_tokens"], first["initiating_version"]) == (0.8, 16, 4)
    assert (evaluated["trajectory"], evaluated["temperature"]) == (f"eval-{name(0)}", 0.0)


async def test_each_is_announced_before_its_slower_siblings_end(tmp_path):
    async with working(tmp_path, {0: [0.6], 1: ["end"], 2: [0.3]}) as (_, worker):
        announced: list[str] = []
        running = asyncio.create_task(
            worker.run([spec(member) for member in range(3)], lambda header: announced.append(header["key"]))
        )
        await asyncio.sleep(0.15)
        assert announced == [name(1)]
        returned = await running
    assert announced == [name(1), name(2), name(0)]
    assert [header["key"] for header in returned] == [name(0), name(1), name(2)]


async def test_what_goes_wrong_with_one_leaves_its_siblings_alone_and_is_not_stored(tmp_path):
    script = {
        0: ["1", "raise"],
        1: ["hang"],
        2: [RpcError("generation_failed", "no worker")],
        3: [RpcError("stale", "old")],
        4: ["nan", "end"],
        5: ["crash"],
        6: ["1", "end"],
    }
    async with working(tmp_path, script) as (_, worker):
        first, _ = await run(worker, [spec(member) for member in (0, 1, 2, 3, 4, 6)])
        crashed, _ = await run(worker, [spec(5)])
    assert [header.stop for header in [*first, *crashed]] == [
        StopReason.ENVIRONMENT_ERROR,
        StopReason.ENVIRONMENT_TIMEOUT,
        StopReason.GENERATION_ERROR,
        StopReason.STALE,
        StopReason.TERMINATED,
        StopReason.TERMINATED,
        StopReason.ENVIRONMENT_ERROR,
    ]
    kinds = [type(header.outcome) for header in [*first, *crashed]]
    assert kinds == [InfraError, InfraError, InfraError, Skip, InfraError, Reward, InfraError]
    assert "told to raise" in first[0].error
    assert [sample.name for sample in stored(tmp_path).names()] == [name(6)]


async def test_rewards_that_fail_or_skip_are_reported_and_not_stored(tmp_path):
    async with working(tmp_path, {0: ["none"], 1: ["text"], 2: ["skip"], 3: ["0.5"]}) as (_, worker):
        headers, _ = await run(worker, [spec(member, "judged") for member in range(4)])
    assert [type(header.outcome) for header in headers] == [InfraError, InfraError, Skip, Reward]
    assert [header.name for header in headers] == [None, None, None, name(3)]
    assert [sample.name for sample in stored(tmp_path).names()] == [name(3)]


async def test_running_a_member_twice_stores_it_once_and_tells_of_what_is_stored(tmp_path):
    async with working(tmp_path, {0: ["0.5", "end", "1", "1", "end"]}) as (_, worker):
        (first,), _ = await run(worker, [spec(0)])
        (second,), _ = await run(worker, [spec(0)])
    assert first.outcome == second.outcome == Reward(0.5)
    assert (second.tokens, second.turns, second.name) == (first.tokens, 2, name(0))
    assert len(stored(tmp_path).names()) == 1


async def test_an_evaluation_member_is_judged_but_not_stored(tmp_path):
    async with working(tmp_path, {0: ["1", "end"]}) as (_, worker):
        (header,), _ = await run(worker, [spec(0, commit=False)])
    assert (header.outcome, header.name) == (Reward(1.0), None)
    assert stored(tmp_path).names() == []


async def test_an_abort_ends_the_named_episodes_whatever_they_do(tmp_path):
    async with working(tmp_path, {0: ["sleep 0.45"], 1: [60.0], 2: [0.6]}) as (proxy, worker):
        running = asyncio.create_task(run(worker, [spec(member) for member in range(3)]))
        await asyncio.sleep(0.2)
        began = asyncio.get_running_loop().time()
        await proxy.abort([name(0), "unknown"], "stale")
        await proxy.abort([name(1)], "cancelled")
        headers, announced = await running
        assert asyncio.get_running_loop().time() - began < 2.0
        assert announced[0].key.member == 0
        await asyncio.sleep(0.1)
    assert [header.stop for header in headers] == [
        StopReason.STALE,
        StopReason.CANCELLED,
        StopReason.TERMINATED,
    ]
    assert headers[0].sampled_tokens == len("sleep 0.45") + 1
    assert sorted(proxy.finished) == [name(0), name(1), name(2)]
    assert [sample.name for sample in stored(tmp_path).names()] == [name(2)]


async def test_an_abort_ends_a_reward_under_way_and_nothing_is_stored(tmp_path):
    async with working(tmp_path, {0: ["doze 20"], 1: ["0.5"]}) as (proxy, worker):
        (second,), _ = await run(worker, [spec(1, "judged_slowly")])  # its reward worker is up after this
        running = asyncio.create_task(run(worker, [spec(0, "judged_slowly")]))
        while await proxy.asked.get() != name(0):
            pass
        await asyncio.sleep(0.5)  # the action is on its way through the environment to the reward
        await proxy.abort([name(0)], "cancelled")
        (first,), _ = await running
    assert (first.stop, first.outcome) == (StopReason.CANCELLED, Skip("cancelled"))
    assert first.sampled_tokens == len("doze 20") + 1
    assert second.outcome == Reward(0.5)
    assert [sample.name for sample in stored(tmp_path).names()] == [name(1)]


async def test_in_lockstep_rewards_are_scored_when_all_episodes_are_over(tmp_path):
    async with working(tmp_path, {0: ["0.5"], 1: ["1"]}, train={"mode": "sync", "alpha": 0}) as (
        proxy,
        worker,
    ):
        first, second = (asyncio.create_task(run(worker, [spec(member, "judged")])) for member in range(2))
        ended = {await proxy.waiting.get(), await proxy.waiting.get()}
        assert ended == {name(0), name(1)}
        assert not first.done()
        assert stored(tmp_path).names() == []
        proxy.all_over.set()
        await asyncio.gather(first, second)
        proxy.script[f"eval-{name(1)}"] = ["1"]
        await run(worker, [spec(1, "judged", commit=False)], prefix="eval-")
    assert proxy.waiting.empty(), "an evaluation waits for nobody"
    assert len(stored(tmp_path).names()) == 2


async def test_an_abort_ends_a_member_that_waits_for_its_place(tmp_path):
    async with working(tmp_path, {0: [0.6], 1: ["end"], 2: ["end"]}, concurrent_trajectories=1) as (
        proxy,
        worker,
    ):
        announced: list[dict[str, Any]] = []
        running = asyncio.create_task(worker.run([spec(member) for member in range(3)], announced.append))
        await asyncio.sleep(0.2)
        await proxy.abort([name(1)], "cancelled")
        await asyncio.sleep(0.1)
        assert [(header["key"], header["stop"]) for header in announced] == [(name(1), "cancelled")]
        await running
    assert [header["key"] for header in announced] == [name(1), name(0), name(2)]


async def test_a_turn_lost_with_its_proxy_is_asked_for_again_once_that_is_back(tmp_path):
    async with working(tmp_path, {0: [60.0, "end"], 1: ["end"]}) as (proxy, worker):
        running = asyncio.create_task(run(worker, [spec(0)]))
        await asyncio.sleep(0.2)
        port = int(worker._proxy_address["url"].rsplit(":", 1)[1])
        await proxy.server.stop()
        await asyncio.sleep(0.2)
        assert not running.done()
        await proxy.server.start(port=port)
        (header,), _ = await running
        assert header.stop is StopReason.TERMINATED
        (header,), _ = await run(worker, [spec(1)])
        assert header.stop is StopReason.TERMINATED


async def test_members_run_in_dask_and_their_headers_arrive_over_its_events(tmp_path):
    async with (
        proxied(tmp_path, {0: ["0.5", "end"], 1: [0.5], 2: ["raise"], 3: ["end"]}) as (_, settings),
        LocalCluster(
            n_workers=1, threads_per_worker=4, processes=False, asynchronous=True, dashboard_address=None
        ) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        heard: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        client.subscribe_topic(
            "ended", lambda event: heard.put_nowait({k: v for k, v in event[1].items() if k != "worker"})
        )
        members = [spec(member).to_json() for member in range(3)]
        future = client.submit(run_members, settings, members, pure=False)
        other = client.submit(run_members, settings, [spec(3).to_json()], pure=False)
        early = [TrajectoryHeader.from_json(await asyncio.wait_for(heard.get(), 20)) for _ in range(3)]
        assert not future.done()
        assert sorted(header.key.member for header in early) == [0, 2, 3]
        returned = [TrajectoryHeader.from_json(header) for header in await future]
        late = TrajectoryHeader.from_json(await asyncio.wait_for(heard.get(), 20))
        assert late == returned[1]
        assert [header.stop for header in returned] == [
            StopReason.TERMINATED,
            StopReason.TERMINATED,
            StopReason.ENVIRONMENT_ERROR,
        ]
        assert len(await other) == 1
        assert worker_module._worker is not None
        present = worker_module._worker.ready.result()
        assert await client.submit(run_members, {**settings, "prefix": "eval-"}, [], pure=False) == []
        assert worker_module._worker.ready.result() is present
        await close_worker()
    assert sorted(sample.name for sample in stored(tmp_path).names()) == [name(0), name(1), name(3)]


@pytest.mark.slow
async def test_members_run_in_a_dask_worker_process(tmp_path):
    async with (
        proxied(tmp_path, {member: ["1", "end"] for member in range(40)}) as (_, settings),
        LocalCluster(
            n_workers=1, threads_per_worker=8, processes=True, asynchronous=True, dashboard_address=None
        ) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        futures = [
            client.submit(run_members, settings, [spec(member).to_json()], pure=False) for member in range(40)
        ]
        headers = [TrajectoryHeader.from_json((await future)[0]) for future in futures]
    assert [header.outcome for header in headers] == [Reward(1.0)] * 40
    assert len(stored(tmp_path).names()) == 40
