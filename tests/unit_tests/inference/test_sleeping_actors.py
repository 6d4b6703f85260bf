"""What the pool makes of actors that sleep: in turns with the trainer, too busy for it, lost, found asleep."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.patience import eventually
from tests.unit_tests.inference.test_parity import IDS, Liar, of
from tests.unit_tests.inference.test_parity import make_config as parity_config
from tests.unit_tests.inference.test_parity import run as run_pool
from torchtitan.config.job_config import JobConfig
from torchtitan.inference.actor_client import ActorError, ActorHealth, ActorNotReady
from torchtitan.inference.pool import actor, actor_process
from torchtitan.inference.pool.actor_pool import InferencePool
from torchtitan.inference.types import (
    TAGS,
    Capabilities,
    Completion,
    GenerateRequest,
    SamplingParameters,
    ScoredTokens,
    Tag,
    VersionSpan,
)
from torchtitan.utils.json_lines import EventLog, read_json_lines
from torchtitan.weight_sync.actor_state import ActorState

ASLEEP, READY = "asleep", "ready"


class Sleeper(Liar):
    """The handler of an actor in this process. Whoever asks it for tokens while it is not awake fails the test."""

    def __init__(self) -> None:
        super().__init__()
        self.version = 0
        self.asleep: set[Tag] = set()
        self.orders: list[str] = []
        self.able = Capabilities("vllm", "0.32.0", score=True, sleep=True)
        self.busy = False
        """What runs does not finish"""
        self.failing = ""
        """sleep or wake: the order that comes to nothing"""
        self.weights_state = ActorState.READY
        self.probes = 0
        self.frozen = False
        self.draining = False
        """It takes nothing new, and finishes what runs before a version"""
        self.generating = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.wrong: list[str] = []

    async def health(self, timeout_s: float) -> ActorHealth:
        self.probes += 1
        if self.frozen:
            await asyncio.sleep(timeout_s)
            raise ActorError("health", "no answer")
        state = ActorState.APPLYING if self.draining else ActorState.READY
        state = ActorState.ASLEEP if self.asleep else state
        asleep = tuple(tag for tag in TAGS if tag in self.asleep)
        serves = state is ActorState.READY
        return ActorHealth(state, serves, "e", self.version, asleep=asleep, weights_state=self.weights_state)

    async def connect_weights(self, *_: object) -> None:
        self.orders.append("connect")
        if "weights" in self.asleep:
            self.wrong.append("connected while its weights were away")

    async def generate(self, request: GenerateRequest, timeout_s: float) -> list[Completion]:
        if self.asleep:
            self.wrong.append("asked to generate asleep")
            raise ActorNotReady("generate", "asleep")
        self.generating.set()
        await self.goes_on.wait()
        return [Completion([1], [-0.1], "stop", [VersionSpan("e", self.version, 0, 1)])] * request.sampling.n

    async def score(self, token_ids: list[int], timeout_s: float) -> ScoredTokens:
        if self.asleep:
            self.wrong.append("probed asleep")
            raise ActorNotReady("score", "asleep")
        return ScoredTokens([-1.0] * (len(token_ids) - 1), "e", self.version)

    async def sleep(self, level: int, timeout_s: float) -> bool:
        self.orders.append(f"sleep {level}")
        if self.failing == "sleep":
            raise ActorError("sleep", "no")
        if self.busy:
            return False
        self.asleep = set(TAGS)
        return True

    async def wake(self, tags: Sequence[Tag], timeout_s: float) -> None:
        self.orders.append(f"wake {' '.join(tags)}")
        if self.failing == "wake":
            raise ActorError("wake", "no")
        self.asleep -= set(tags)

    async def close(self) -> None:
        self.orders.append("close")


def make_config(**inference: Any) -> JobConfig:
    config = parity_config()
    config.grpo.async_weight_update, config.inference.sleep_level = False, 1
    config.inference.sleep_timeout_s = config.inference.drain_timeout_s = 20.0
    vars(config.inference).update(inference)
    return config


def run(
    tmp_path: Path,
    scenario: Callable[..., Awaitable[None]],
    config: JobConfig | None = None,
    left_asleep: Sequence[Tag] = (),
) -> list[dict[str, Any]]:
    """Two actors behind a pool, ready; returns its events. left_asleep: parts of the first one at the start."""
    made: list[Sleeper] = []

    def make() -> Sleeper:
        made.append(Sleeper())
        made[0].asleep |= set(left_asleep)
        return made[-1]

    async def ready(pool: InferencePool, *sleepers: Sleeper) -> None:
        await eventually(lambda: set(pool.actors.values()) == {READY})
        await scenario(pool, *sleepers)

    events = run_pool(tmp_path, config or make_config(), ready, make)
    for sleeper in made:
        assert sleeper.wrong == []
        assert sleeper.orders[-1] == "close"
    return events


def request(name: str) -> GenerateRequest:
    return GenerateRequest(name, IDS, SamplingParameters(4))


def test_sleeping_actors_get_no_requests_until_they_are_awake(tmp_path: Path) -> None:
    async def scenario(pool: InferencePool, first: Sleeper, second: Sleeper) -> None:
        pool.answers.expect(0, IDS, [-1.0] * 3)
        await pool.sleep()
        assert first.asleep == second.asleep == set(TAGS) and set(pool.actors.values()) == {ASLEEP}
        assert pool.serving_version() is None
        waiting = [asyncio.ensure_future(pool.generate(request(f"r{i}"), min_version=1)) for i in range(4)]
        # A version that is to be probed comes while they sleep; several looks at them pass.
        pool.answers.expect(1, IDS, [-1.0] * 3)
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in waiting)
        await pool.wake("weights")
        assert first.asleep == second.asleep == {"kv_cache"}
        assert not any(task.done() for task in waiting)
        first.version = second.version = 1
        await pool.wake("kv_cache")
        assert set(pool.actors.values()) == {READY}
        answers = await asyncio.gather(*waiting)
        assert {completion.spans[0].version for answer in answers for completion in answer} == {1}
        for sleeper in (first, second):
            assert sleeper.orders == ["connect", "sleep 1", "wake weights", "wake kv_cache"]

    events = run(tmp_path, scenario)
    assert {event["kind"] for event in events} <= {"actor_ready", "weights_probed", "weights_verified"}


def test_running_requests_finish_before_sleep_and_a_busy_actor_stays_awake(tmp_path: Path) -> None:
    async def scenario(pool: InferencePool, first: Sleeper, second: Sleeper) -> None:
        for sleeper in (first, second):
            sleeper.goes_on.clear()
        tasks = [asyncio.ensure_future(pool.generate(request(f"r{i}"))) for i in range(2)]
        await eventually(lambda: first.generating.is_set() and second.generating.is_set())
        sleeping = asyncio.ensure_future(pool.sleep())
        await asyncio.sleep(0.1)
        assert not first.asleep and not second.asleep and not sleeping.done()
        second.goes_on.set()
        await sleeping
        # Its sampling goes on, and is not redone elsewhere.
        assert second.asleep == set(TAGS) and not first.asleep and not first.orders[1:]
        first.goes_on.set()
        await asyncio.gather(*tasks)
        # Awake by accident: it gets nothing that would keep it from the trainer's next version.
        waiting = asyncio.ensure_future(pool.generate(request("late")))
        await asyncio.sleep(0.2)
        assert not waiting.done() and pool.actors["actor-0"] == READY
        await pool.wake("weights")
        await pool.wake("kv_cache")
        assert await waiting
        assert set(pool.actors.values()) == {READY} and pool.statistics["requests_redone"] == 0

    (event,) = of(run(tmp_path, scenario, make_config(drain_timeout_s=0.5)), "actor_stays_awake")
    assert event["actor"] == "actor-0" and "1 sequences are not finished" in event["reason"]


@pytest.mark.parametrize("busy", [True, False])
def test_an_actor_that_cannot_sleep_now_or_ever_stays_as_it_is(tmp_path: Path, busy: bool) -> None:
    async def scenario(pool: InferencePool, first: Sleeper, second: Sleeper) -> None:
        first.busy = busy
        if not busy:
            first.able = Capabilities("vllm", "0.32.0", score=True)
        for _ in range(2):
            await pool.sleep()
            assert second.asleep == set(TAGS) and not first.asleep
            await pool.wake("weights")
            await pool.wake("kv_cache")
        await eventually(lambda: set(pool.actors.values()) == {READY})
        assert first.orders.count("sleep 1") == (2 if busy else 0)

    events = run(tmp_path, scenario)
    stays = of(events, "actor_stays_awake")
    assert [event["actor"] for event in stays] == ["actor-0"] * (2 if busy else 1)
    assert ("still busy" if busy else "was started unable to sleep") in stays[0]["reason"]
    assert not of(events, "actor_evicted")


@pytest.mark.parametrize("order", ["sleep", "wake"])
def test_a_failure_to_sleep_or_wake_evicts_and_is_tried_again(tmp_path: Path, order: str) -> None:
    async def scenario(pool: InferencePool, first: Sleeper, second: Sleeper) -> None:
        first.failing = order
        await pool.sleep()
        await pool.wake("weights")
        if order == "wake":
            await eventually(lambda: pool.statistics["evictions"] >= 1)
        first.failing = ""
        await pool.wake("kv_cache")
        await eventually(lambda: set(pool.actors.values()) == {READY})
        assert not first.asleep
        assert await pool.generate(request("r"))

    evicted = of(run(tmp_path, scenario), "actor_evicted")
    assert evicted[0]["actor"] == "actor-0" and evicted[0]["noticed_by"] == order


def test_actors_that_an_earlier_run_left_asleep_are_woken_before_they_get_weights(tmp_path: Path) -> None:
    async def scenario(pool: InferencePool, first: Sleeper, second: Sleeper) -> None:
        assert first.orders == ["wake weights kv_cache", "connect"] and second.orders == ["connect"]
        assert await pool.generate(request("r"))

    run(tmp_path, scenario, make_config(sleep_level=0), TAGS)


def test_an_actor_that_comes_back_meanwhile_is_put_to_sleep_too(tmp_path: Path) -> None:
    async def scenario(pool: InferencePool, first: Sleeper, second: Sleeper) -> None:
        first.frozen = True
        await eventually(lambda: pool.actors["actor-0"] == "evicted")
        await pool.sleep()
        assert second.asleep and not first.asleep
        first.frozen = False
        await eventually(lambda: first.asleep)
        await eventually(lambda: pool.actors["actor-0"] == ASLEEP)
        assert first.orders == ["connect", "sleep 1"]
        await pool.wake("weights")
        # Only now: asleep it could do nothing with them.
        await eventually(lambda: first.orders[2:] == ["wake weights", "connect"])
        await pool.wake("kv_cache")
        await eventually(lambda: set(pool.actors.values()) == {READY})

    run(tmp_path, scenario, make_config(health_timeout_s=0.3))


def test_an_actor_with_a_version_on_its_way_is_not_pressed(tmp_path: Path) -> None:
    async def scenario(pool: InferencePool, first: Sleeper, second: Sleeper) -> None:
        first.weights_state = ActorState.APPLYING
        await pool.sleep()
        assert second.asleep and first.orders == ["connect"]
        await pool.wake("weights")
        await pool.wake("kv_cache")
        await eventually(lambda: set(pool.actors.values()) == {READY})

    (event,) = of(run(tmp_path, scenario, make_config(sleep_timeout_s=1.0)), "actor_stays_awake")
    assert event["actor"] == "actor-0" and "not asleep within 1 s" in event["reason"]


def test_an_actor_that_wakes_behind_a_version_is_looked_at_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "PROBE_S", 60.0)

    async def scenario(pool: InferencePool, first: Sleeper, second: Sleeper) -> None:
        await pool.sleep()
        await pool.wake("weights")
        first.weights_state = ActorState.APPLYING
        waking = asyncio.ensure_future(pool.wake("kv_cache"))
        probes = first.probes
        await eventually(lambda: not second.asleep and first.probes > probes + 5)
        first.weights_state = ActorState.READY
        await waking
        assert not first.asleep

    config = make_config(health_timeout_s=600.0, sleep_timeout_s=10.0)
    assert not of(run(tmp_path, scenario, config), "actor_stays_asleep")


def test_a_run_that_ends_leaves_servers_awake(tmp_path: Path) -> None:
    found: list[Sleeper] = []

    async def scenario(pool: InferencePool, first: Sleeper, second: Sleeper) -> None:
        found.extend((first, second))
        await pool.sleep()

    run(tmp_path, scenario)
    assert [sleeper.asleep for sleeper in found] == [set(), set()]
    assert all(sleeper.orders[-2:] == ["wake weights kv_cache", "close"] for sleeper in found)


def test_a_drain_is_no_trouble_and_what_runs_in_one_can_be_redone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "BRIEFLY_S", 0.05)

    async def scenario(pool: InferencePool, first: Sleeper, second: Sleeper) -> None:
        for sleeper in (first, second):
            sleeper.goes_on.clear()
        tasks = [asyncio.ensure_future(pool.generate(request(f"r{i}"))) for i in range(2)]
        await eventually(lambda: first.generating.is_set() and second.generating.is_set())
        first.draining, first.weights_state = True, ActorState.APPLYING
        await eventually(lambda: pool.actors["actor-0"] == "applying")
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in tasks)
        # Its engine has frozen meanwhile, and the registry has given it up.
        await pool.redo_elsewhere("actor-0", "no progress")
        second.goes_on.set()
        await asyncio.gather(*tasks)
        assert pool.statistics["requests_redone"] == 1
        first.draining, first.weights_state = False, ActorState.READY
        first.goes_on.set()
        await eventually(lambda: pool.actors["actor-0"] == READY)

    events = run(tmp_path, scenario, make_config(sleep_level=0))
    assert not of(events, "actor_not_serving") and len(of(events, "actor_ready")) == 2


class Process:
    """A process of the run's own, which serves at once wherever it is started."""

    def __init__(self) -> None:
        self.alive, self.starts, self._ended = False, 0, asyncio.Event()
        self.restarts = 0

    async def may_restart(self, _served_s: float) -> bool:
        self.restarts += 1
        return True

    async def start(self) -> str:
        self.alive, self.starts = True, self.starts + 1
        self._ended.clear()
        return "http://127.0.0.1:1"

    async def wait(self) -> None:
        await self._ended.wait()

    async def stop(self, grace_s: float = 0.0) -> None:
        self.alive = False
        self._ended.set()

    def describe_end(self) -> str:
        return "stopped"


def test_a_process_whose_order_to_sleep_takes_too_long_has_no_successor_before_the_others_wake(tmp_path: Path) -> None:
    """The trainer has its memory until then."""
    events = EventLog(tmp_path / "events.jsonl")

    class Slow(Sleeper):
        async def sleep(self, level: int, timeout_s: float) -> bool:
            self.orders.append("sleep")
            # The order begins later than the wait for it, and ends by the same deadline.
            await asyncio.sleep(timeout_s)
            raise ActorError("sleep", "no answer in time")

    async def work() -> None:
        sleeper, process = Slow(), Process()
        config = make_config(sleep_timeout_s=0.3)
        slow_actor = actor.Actor("a", config, "e", "key", events, lambda _: sleeper, lambda: None, process)
        slow_actor.connect("127.0.0.1:9")
        supervision = asyncio.ensure_future(slow_actor.supervise())
        await eventually(lambda: slow_actor.state.value == READY)
        await slow_actor.sleep(1, 0.3)
        await eventually(lambda: not process.alive)
        await asyncio.sleep(2 * actor_process.BACKOFF_S)
        assert process.starts == 1 and slow_actor.state.value == "evicted"
        await slow_actor.wake(["kv_cache"], 0.3)
        await eventually(lambda: process.starts == 2)
        supervision.cancel()

    asyncio.run(work())
    assert [event["kind"] for event in read_json_lines(events.path)][:3] == [
        "actor_ready",
        "actor_stays_awake",
        "actor_evicted",
    ]
