"""The pool against actor processes that are killed, frozen, never come up or answer nonsense.

The actors are fakes with the real ones' command line and routes; test_actors.py does the same with the real engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.patience import PATIENCE_S, asynchronous, eventually
from tests.unit_tests.inference.json_server import serving
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.actor_client import base_url
from torchtitan.inference.pool import actor_process
from torchtitan.inference.pool.actor_pool import InferencePool
from torchtitan.inference.pool.weight_connection import WeightConnection
from torchtitan.inference.pool.weight_probe import ParityGuard
from torchtitan.inference.types import Completion, GenerateRequest, SamplingParameters
from torchtitan.utils.json_lines import EventLog, JsonLines, read_json_lines
from torchtitan.weight_sync.wire.handshake import HTTP, role_key

VERSION = 7  # the fake takes the registry's port for its version


@pytest.fixture(autouse=True)
def fake_actors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ENGINE", str(tmp_path))
    real = actor_process.actor_command

    def command(config: JobConfig, port_file: Path, number: int) -> list[str]:
        return [
            "tests.unit_tests.inference.fake_actor" if part == "torchtitan.inference.engines.embedded" else part
            for part in real(config, port_file, number)
        ]

    monkeypatch.setattr(actor_process, "actor_command", command)
    monkeypatch.setattr("torchtitan.inference.pool.actor_process.BACKOFF_S", 0.05)


def make_config(**inference: Any) -> JobConfig:
    config = JobConfig()
    config.model.hf_assets_path = ""
    config.inference.health_timeout_s = 0.5
    config.inference.startup_timeout_s = PATIENCE_S
    vars(config.inference).update(inference)
    return config


def request(number: int, token: int = 3, n: int = 2) -> GenerateRequest:
    return GenerateRequest(f"r{number}", [token], SamplingParameters(max_tokens=4, n=n))


def pids(completions: list[Completion]) -> set[int]:
    return {completion.token_ids[0] for completion in completions}


@contextlib.asynccontextmanager
async def running(config: JobConfig, run_dir: Path, joined: bool = True) -> AsyncIterator[InferencePool]:
    """Until all actors serve, if `joined`; else they are not even told where weights come from."""
    pool = InferencePool(config, "epoch", "secret", run_dir, EventLog(run_dir / "events.jsonl"))
    await pool.start()
    try:
        if joined:
            await pool.connect_weights(f"registry:{VERSION}")
            await eventually(ready(pool, len(pool.actors)))
        yield pool
    finally:
        await asyncio.wait_for(pool.close(), 30)


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_json_lines(run_dir / "events.jsonl") if event["kind"] == kind]


def process_ids(pool: InferencePool) -> dict[str, int]:
    return {actor.name: actor._process.pid for actor in pool._actors}  # type: ignore[union-attr]


def ready(pool: InferencePool, count: int) -> Callable[[], bool]:
    return lambda: list(pool.actors.values()).count("ready") == count


@asynchronous
async def test_requests_wait_for_weights_and_then_spread_over_the_actors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So long that both have the version before one of them has finished.
    monkeypatch.setenv("FAKE_DELAY_S", "1.0")
    async with running(make_config(), tmp_path, joined=False) as pool:
        waiting = [asyncio.ensure_future(pool.generate(request(i))) for i in range(6)]
        await eventually(lambda: list(pool.actors.values()) == ["joining"] * 2)
        assert not any(task.done() for task in waiting)
        await pool.connect_weights(f"registry:{VERSION}")
        results = await asyncio.gather(*waiting)
        assert all(len(completions) == 2 for completions in results)
        assert results[0][0].spans[0].version == VERSION
        assert pool.serving_version() == VERSION
        await eventually(ready(pool, 2))
        assert await pool.generate(request(9), min_version=VERSION)
        waiting = [asyncio.ensure_future(pool.generate(request(i), VERSION + 1)) for i in range(6)]
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in waiting)
        await pool.connect_weights(f"registry:{VERSION + 1}")
        results = await asyncio.gather(*waiting)
        assert {completions[0].spans[0].version for completions in results} == {VERSION + 1}
        # whichever actor had the version first, the other got its half
        counts = Counter(pid for completions in results for pid in pids(completions))
        assert sorted(counts.values()) == [3, 3]


@asynchronous
async def test_a_killed_actor_loses_no_request_is_logged_restarted_and_rejoins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DELAY_S", "0.3")
    async with running(make_config(), tmp_path) as pool:
        victim = process_ids(pool)["actor-1"]
        tasks = [asyncio.ensure_future(pool.generate(request(i))) for i in range(8)]
        await asyncio.sleep(0.15)
        os.kill(victim, signal.SIGKILL)
        results = await asyncio.gather(*tasks)
        assert victim not in set().union(*map(pids, results))
        (event,) = events(tmp_path, "actor_evicted")
        assert (event["actor"], event["unfinished_requests"]) == ("actor-1", 4)
        assert event["state"] in ("ready", "suspect")
        assert "SIGKILL" in event["reason"]
        assert pool.statistics["requests_redone"] == 4
        await eventually(ready(pool, 2))
        newcomer = process_ids(pool)["actor-1"]
        assert newcomer != victim
        results = await asyncio.gather(*(pool.generate(request(i)) for i in range(8)))
        assert newcomer in set().union(*map(pids, results))
        assert pool.statistics["restarts"] == 1


@asynchronous
async def test_an_actor_that_weight_sync_gave_up_loses_its_prompts_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DELAY_S", "0.3")
    # Its engine answers health probes, or does not for much longer than this test lasts: that is not what counts.
    async with running(make_config(health_timeout_s=30.0), tmp_path) as pool:
        frozen = process_ids(pool)["actor-0"]
        tasks = [asyncio.ensure_future(pool.generate(request(i))) for i in range(6)]
        await eventually(lambda: sum(actor.load for actor in pool._actors) == 12)
        os.kill(frozen, signal.SIGSTOP)
        try:
            await pool.redo_elsewhere("actor-0", "no answer to an offer within 5 s (in SUSPECT)")
            await pool.redo_elsewhere("actor-0", "again")  # out already
            await pool.redo_elsewhere("nobody", "unknown")
            results = await asyncio.wait_for(asyncio.gather(*tasks), 10)
            assert frozen not in set().union(*map(pids, results))
            assert pool.statistics["requests_redone"] == 3
            assert pool.actors["actor-0"] == "suspect"
            results = await asyncio.gather(*(pool.generate(request(i)) for i in range(4)))
            assert frozen not in set().union(*map(pids, results))
        finally:
            os.kill(frozen, signal.SIGCONT)
        await eventually(ready(pool, 2))
        results = await asyncio.gather(*(pool.generate(request(i)) for i in range(4)))
        assert frozen in set().union(*map(pids, results))
        assert pool.statistics["evictions"] == 0


@asynchronous
async def test_a_poisoned_actor_gets_no_prompts_and_what_it_had_is_redone_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "poisoned"
    monkeypatch.setenv("FAKE_DELAY_S", "0.3")
    async with running(make_config(), tmp_path) as pool:
        victim = process_ids(pool)["actor-1"]
        tasks = [asyncio.ensure_future(pool.generate(request(i))) for i in range(6)]
        await eventually(lambda: sum(actor.load for actor in pool._actors) == 12)
        file.write_text(str(victim))
        results = await asyncio.gather(*tasks)
        assert victim not in set().union(*map(pids, results))
        await eventually(lambda: pool.actors["actor-1"] == "poisoned")
        results = await asyncio.gather(*(pool.generate(request(i)) for i in range(6)))
        assert victim not in set().union(*map(pids, results))
        file.unlink()  # a whole version was applied
        await eventually(ready(pool, 2))
        results = await asyncio.gather(*(pool.generate(request(i)) for i in range(6)))
        assert victim in set().union(*map(pids, results))
        # It lives and heals itself: neither an eviction nor a failure of the requests.
        assert not any(pool.statistics.values())


@asynchronous
async def test_an_actor_that_never_wakes_is_killed_and_replaced(tmp_path: Path) -> None:
    config = make_config(num_actors=1)
    async with running(config, tmp_path) as pool:
        frozen = process_ids(pool)["actor-0"]
        config.inference.startup_timeout_s = 1.0
        os.kill(frozen, signal.SIGSTOP)
        await eventually(lambda: bool(events(tmp_path, "actor_killed")))
        config.inference.startup_timeout_s = PATIENCE_S
        await eventually(ready(pool, 1))
        assert process_ids(pool)["actor-0"] != frozen


@asynchronous
async def test_actors_that_never_come_up_are_given_up_and_the_request_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_EXIT", "1")
    async with running(make_config(max_restarts=1), tmp_path, joined=False) as pool:
        with pytest.raises(UserError, match="no inference actor is left.*the fake actor was told to fail"):
            await pool.generate(request(0))
        assert pool.actors == {"actor-0": "given_up", "actor-1": "given_up"}


@asynchronous
async def test_what_ails_an_actor_for_a_while_costs_no_restart(tmp_path: Path) -> None:
    dead, lost, hang = (tmp_path / name for name in ("dead", "lost", "hang"))
    async with running(make_config(num_actors=1, max_retries=1), tmp_path) as pool:
        # No request is wasted on an engine whose death is not known yet.
        dead.touch()
        redone = asyncio.create_task(pool.generate(request(0)))
        await eventually(lambda: pool.actors["actor-0"] == "suspect")
        # Time for many probes, all of which find the actor itself in good health.
        await asyncio.sleep(1.0)
        assert pool.actors["actor-0"] == "suspect"
        assert not redone.done()
        dead.unlink()
        assert await redone
        assert pool.statistics == Counter(requests_redone=1)
        # One whose receiver of weights gave up is connected anew.
        lost.touch()
        await eventually(lambda: not lost.exists())
        (event,) = events(tmp_path, "actor_weights_lost")
        assert event["reason"] == "no registry for 60 s"
        assert await pool.generate(request(0))
        # Refused requests and a malformed answer or two do it no harm.
        with pytest.raises(UserError, match="refused request r0.*400"):
            await pool.generate(request(0, token=13))
        with pytest.raises(UserError, match=r"failed 2 times .*413"):
            await pool.generate(request(0, token=14))
        with pytest.raises(UserError, match=r"failed 2 times .1 retries.*malformed"):
            await pool.generate(request(1, token=17))
        assert await pool.generate(request(2))
        assert pool.statistics["evictions"] == 0
        # One whose engine hangs is taken out until it moves.
        hang.touch()
        await eventually(lambda: pool.actors["actor-0"] == "evicted")
        (event,) = events(tmp_path, "actor_evicted")
        assert event["noticed_by"] == "engine" and "not moved for 60" in event["reason"]
        hang.unlink()
        assert await pool.generate(request(0))
        assert pool.statistics["restarts"] == 0


@asynchronous
async def test_running_servers_are_used_and_a_wrong_token_ends_the_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, third = tmp_path / "second", tmp_path / "third"
    second.mkdir(), third.mkdir()
    async with running(make_config(num_actors=1), tmp_path) as pool:
        url = pool._actors[0]._client.url
        monkeypatch.setenv("TORCHTITAN_ACTOR_TOKEN", role_key("secret", HTTP, "actor-0"))
        async with running(make_config(servers=[url]), second) as outer:
            assert await outer.generate(request(0))
        monkeypatch.setenv("TORCHTITAN_ACTOR_TOKEN", "wrong")
        outer = InferencePool(make_config(servers=[url]), "epoch", "secret", third, EventLog(third / "events"))
        try:
            with pytest.raises(UserError, match=f"{url} refuses our token .*TORCHTITAN_ACTOR_TOKEN"):
                await outer.start()
        finally:
            await outer.close()


@asynchronous
async def test_a_server_that_refuses_our_token_later_is_evicted_for_that(tmp_path: Path) -> None:
    answers = [(200, {"state": "ready", "serves": True, "epoch": "epoch", "version": VERSION})]
    with serving(post=lambda path, body: (200, {}), get=lambda path: answers[-1]) as url:
        async with running(make_config(servers=[url]), tmp_path) as pool:
            answers.append((401, {"error": "token"}))
            await eventually(lambda: bool(events(tmp_path, "actor_evicted")))
            (event,) = events(tmp_path, "actor_evicted")
            assert f"{url} refuses our token (/health answered 401)" in event["reason"]
            answers.append(answers[0])
            await eventually(ready(pool, 1))


@pytest.mark.parametrize("first", ["an actor's supervision", "the guard"])
def test_a_full_disk_ends_the_wait_for_an_actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    """Whoever is the first to write an event there: it is one and the same message."""
    full = asyncio.Event()

    async def run(guard: ParityGuard, _actors: object) -> None:
        await full.wait()
        guard._events.write("any")

    @asynchronous
    async def scenario() -> None:
        async with running(make_config(num_actors=1), tmp_path) as pool:
            waiting = asyncio.create_task(pool.generate(request(0), VERSION + 1))
            await eventually(lambda: bool(pool._waiting))
            events = pool._events._file
            pool._events._file = JsonLines("/dev/full", durable=True)
            if first == "the guard":
                full.set()
            else:
                os.kill(process_ids(pool)["actor-0"], signal.SIGKILL)
            for call in (waiting, pool.generate(request(1))):
                with pytest.raises(OSError, match="/dev/full") as caught:
                    await asyncio.wait_for(call, PATIENCE_S)
                assert caught.value.errno == errno.ENOSPC
            # Closing says how many versions were verified, and would find the disk full as well.
            pool._events._file = events

    monkeypatch.setattr(ParityGuard, "run", run)
    scenario()


@contextlib.contextmanager
def without_descriptors() -> Iterator[None]:
    """What is open stays open, and nothing else can be opened."""
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))


@asynchronous
async def test_a_lack_of_descriptors_is_said_at_once_and_outlived(tmp_path: Path) -> None:
    async with running(make_config(num_actors=1, max_restarts=100, max_retries=0), tmp_path) as pool:
        victim = process_ids(pool)["actor-0"]
        with (tmp_path / "events.jsonl").open("rb") as log, without_descriptors():
            # One connection is there, from the probes; the others cannot be made.
            outcomes = await asyncio.gather(*(pool.generate(request(i)) for i in range(8)), return_exceptions=True)
            assert all("files and connections open" in str(error) for error in outcomes if isinstance(error, UserError))
            assert any(isinstance(outcome, UserError) for outcome in outcomes)
            os.kill(victim, signal.SIGKILL)
            await eventually(lambda: b"files and connections open" in os.pread(log.fileno(), 1 << 20, 0))
            assert not ready(pool, 1)()
        await eventually(ready(pool, 1))
        assert victim not in pids(await pool.generate(request(9)))


@asynchronous
async def test_an_actor_is_out_also_where_the_event_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DELAY_S", "600")
    async with running(make_config(num_actors=1, max_retries=0), tmp_path) as pool:
        asked = asyncio.create_task(pool.generate(request(0)))
        await eventually(lambda: pool._actors[0].load > 0)
        with monkeypatch.context() as patched:

            def cannot(*_arguments: object, **_named: object) -> None:
                raise OSError(errno.EMFILE, "Too many open files")

            patched.setattr(pool._events._file, "write", cannot)
            (tmp_path / "hang").touch()
            with pytest.raises(UserError, match="evicted: its engine has not moved"):
                await asyncio.wait_for(asked, PATIENCE_S)
            assert pool.actors == {"actor-0": "evicted"}
        (tmp_path / "hang").unlink()
        await eventually(ready(pool, 1))


@asynchronous
async def test_an_actor_that_gets_no_weights_is_connected_anew_and_then_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf = tmp_path / "deaf"
    deaf.touch()
    config = make_config(num_actors=1, max_restarts=1)
    monkeypatch.setattr(WeightConnection, "deadline_s", 0.3)
    async with running(config, tmp_path, joined=False) as pool:
        await eventually(lambda: pool.actors["actor-0"] == "joining")
        await asyncio.sleep(0.5)
        assert not events(tmp_path, "actor_join_timeout"), "nobody has told it where weights come from"
        await pool.connect_weights(f"registry:{VERSION}")
        await eventually(lambda: bool(events(tmp_path, "actor_restarting")))
        assert len(events(tmp_path, "actor_join_timeout")) == 3
        assert "startup_timeout_s = 0.3 s: no weights" in events(tmp_path, "actor_evicted")[0]["reason"]
        with pytest.raises(UserError, match="no inference actor is left.*restarted 1 times.*no weights within"):
            await pool.generate(request(0))


@asynchronous
async def test_an_orphans_port_file_misleads_nobody(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "actor-0.port").write_text("1")
    names: list[str] = []
    config = make_config(num_actors=1)
    async with running(config, tmp_path) as pool:
        for _ in range(2):
            await eventually(ready(pool, 1))
            command = psutil.Process(process_ids(pool)["actor-0"]).cmdline()
            names.append(command[command.index("--port-file") + 1])
            os.kill(process_ids(pool)["actor-0"], signal.SIGKILL)
            await eventually(lambda: pool.actors["actor-0"] != "ready")
    assert names[0] != names[1] and not any(Path(name).exists() for name in names)  # noqa: ASYNC240
    assert base_url("::1", 80) == "http://[::1]:80"
