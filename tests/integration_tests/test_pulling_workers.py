"""Actors of several workers, as real processes: all apply or none counts, whoever dies or freezes when."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.integration_tests import weight_sync_worker
from tests.integration_tests.test_pulling import EPOCH, Job, wait_for
from tests.integration_tests.weight_sync_worker import WORKERS
from tests.journals import journal_of
from tests.patience import PATIENCE_S
from tests.processes import fork
from torchtitan.weight_sync.actor import puller
from torchtitan.weight_sync.actor.actor import SyncActor, Worker
from torchtitan.weight_sync.actor.puller import Served
from torchtitan.weight_sync.memory.staging import StagedVersion, WeightsRefused
from torchtitan.weight_sync.wire.handshake import ACTOR, role_key


class Group:
    """The leader in this process, its workers in processes of their own."""

    def __init__(self, job: Job, shares: bool = True, **options: Any):
        self.shares = shares
        self.job, self.hold, self.served = job, job.folder / "hold", list[int]()
        self.key = role_key(job.token, ACTOR, "a")
        registry = job.publication.registry_address
        self.leader = SyncActor(registry, "a", EPOCH, self.key, self._apply, workers=WORKERS, **options)
        self.leader.start()
        self.processes: dict[int, BaseProcess] = {}

    def _apply(self, staged: StagedVersion) -> None:
        assert staged.tensors == {} and staged.apply_on_workers is not None
        staged.apply_on_workers()
        self.served.append(staged.version)

    def start(self, *numbers: int) -> None:
        for number in numbers:
            arguments = {
                "leader": self.leader.workers_address,
                "actor": "a",
                "worker": number,
                "epoch": EPOCH,
                "key": self.key,
                "log": str(self.job.folder / f"worker-{number}.jsonl"),
                "hold": str(self.hold),
                "shares": self.shares,
            }
            self.processes[number] = fork(weight_sync_worker.run, arguments)

    def signal(self, number: int, how: int) -> None:
        pid = self.processes[number].pid
        assert pid is not None
        os.kill(pid, how)

    def kill(self, number: int) -> None:
        self.processes[number].kill()
        self.processes[number].join(PATIENCE_S)

    def log(self, number: int) -> list[dict[str, Any]]:
        path = self.job.folder / f"worker-{number}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def seen(self) -> dict[str, Any]:
        """What the trainer is told."""
        return dict(self.job.watcher.status()["actors"].get("a", {}))

    def serves(self, version: int) -> None:
        wait_for(lambda: self.seen().get("state") == "ready" and self.seen()["version"] == version, f"{version}")
        for number in self.processes:
            lines = [line for line in self.log(number) if "version" in line]
            assert lines[-1]["version"] == version and all(line["intact"] for line in lines)

    def close(self) -> None:
        self.leader.close()
        for process in self.processes.values():
            process.kill()
            process.join(PATIENCE_S)


def digest_of(version: int) -> str:
    return f"{version:032x}"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path, apply_timeout_s=20.0)
    yield made
    made.close()


@pytest.mark.parametrize("shares", [True, False])
def test_a_worker_that_dies_half_done_with_applying_poisons_until_all_have_a_version(job: Job, shares: bool) -> None:
    with contextlib.closing(Group(job, shares)) as group:
        group.start(*range(WORKERS))
        job.publish()
        group.serves(0)
        figures, whole = group.seen()["figures"], sum(p.numel() * 4 for p in job.parameters.values())
        # What workers share, each of them has received a part of.
        assert (figures["worker_bytes"] < 0.6 * whole) is shares and figures["bytes_full"] >= whole
        # One dies while both are half done with applying: neither counts, until both have the next version.
        group.hold.touch()
        job.publish()
        wait_for(lambda: all({"begun": 1} in group.log(number) for number in range(WORKERS)), "both apply")
        group.kill(0)
        wait_for(lambda: group.leader.status()["state"] == "poisoned", "poisoned")
        assert group.leader.served is None and group.served == [0]
        group.hold.unlink()
        group.start(0)
        group.serves(1)
        job.publish()
        group.serves(2)
        assert group.leader.status()["state"] != "poisoned" and group.served == [0, 1, 2]


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_actor_without_a_worker_leaves_and_joins_again(job: Job, how: signal.Signals) -> None:
    with contextlib.closing(Group(job)) as group:
        group.start(*range(WORKERS))
        job.publish()
        group.serves(0)
        group.signal(1, how)
        wait_for(lambda: group.seen()["state"] == "evicted", "it leaves")
        job.publish()
        if how == signal.SIGSTOP:
            group.signal(1, signal.SIGCONT)
        else:
            group.processes[1].join(PATIENCE_S)
            group.start(1)
        group.serves(1)
        # What a worker that came back without anything would not have made whole does not count as served.
        assert group.served == [0, 1]


class Engine:
    """A worker's engine in this process, that refuses or fails when asked."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.raises: Exception | None = None

    def __call__(self, staged: StagedVersion) -> None:
        if self.raises is not None:
            error, self.raises = self.raises, None
            raise error
        self.versions.append(staged.version)


@pytest.fixture
def workers(job: Job) -> Iterator[Callable[..., tuple[Group, list[Engine]]]]:
    closing = contextlib.ExitStack()

    def make(all_hold: list[int | None] | None = None, **options: Any) -> tuple[Group, list[Engine]]:
        group, engines = closing.enter_context(contextlib.closing(Group(job, **options))), [Engine(), Engine()]
        for number, engine in enumerate(engines):
            held = None if all_hold is None else all_hold[number]
            start(group, number, engine, None if held is None else Served(EPOCH, held, digest_of(held)))
        return group, engines

    def start(group: Group, number: int, engine: Engine, served: Served | None) -> None:
        address = group.leader.workers_address
        worker = Worker(address, "a", number, EPOCH, group.key, engine, served=served)
        closing.callback(worker.close)
        worker.start()

    with closing:
        yield make


def test_what_not_all_workers_apply_is_applied_again_by_all(
    job: Job, workers: Callable[..., tuple[Group, list[Engine]]]
) -> None:
    group, engines = workers()
    job.publish()
    wait_for(lambda: group.served == [0], "0")
    # One fails after the other has applied: poisoned, and all get the same version once more.
    engines[1].raises = MemoryError("half-way")
    job.publish()
    wait_for(lambda: group.served == [0, 1], "1")
    (said,) = journal_of(job.folder, "poisoned", at_least=1)
    assert "worker 1: MemoryError" in said["reason"]
    assert engines[0].versions == [0, 1, 1] and engines[1].versions == [0, 1]
    # All refuse: the actor is as it was. One refuses after the other has applied: poisoned.
    for engine in engines:
        engine.raises = WeightsRefused("not this one")
    job.publish()
    wait_for(lambda: group.served == [0, 1, 2], "2")
    assert len(journal_of(job.folder, "poisoned")) == 1
    engines[0].raises = WeightsRefused("not this one")
    job.publish()
    wait_for(lambda: group.served == [0, 1, 2, 3], "3")
    assert len(journal_of(job.folder, "poisoned", at_least=2)) == 2


@pytest.mark.parametrize(
    ("held", "counts"), [([5, 5], True), ([5, 4], False), ([5, None], False), ([None, None], False)]
)
def test_what_workers_hold_counts_where_it_is_what_the_engine_serves(
    job: Job, workers: Callable[..., tuple[Group, list[Engine]]], held: list[int | None], counts: bool
) -> None:
    assert job.publication.published is not None
    job.publication.published.add(5, digest_of(5))
    group, _ = workers(held, served=Served(EPOCH, 5, digest_of(5)))
    wait_for(lambda: group.seen().get("state") in ("ready", "poisoned"), "it joins")
    assert group.seen()["version"] == (5 if counts else -1)
    assert (group.leader.status()["state"] == "poisoned") is not counts


def test_an_engine_of_another_job_is_not_poisoned(job: Job, workers: Callable[..., tuple[Group, list[Engine]]]) -> None:
    group, _ = workers(served=Served("another", 5, "d5"))
    wait_for(lambda: group.seen().get("state") == "joining", "it joins")
    assert group.leader.status()["state"] != "poisoned"


def test_workers_hold_in_vain_what_the_engine_does_not_serve(
    job: Job, workers: Callable[..., tuple[Group, list[Engine]]]
) -> None:
    group, _ = workers([5, 5])
    wait_for(lambda: group.seen().get("state") == "joining", "it joins")
    assert group.leader.served is None and group.seen()["version"] == -1


@pytest.mark.parametrize(
    ("number", "key", "epoch", "said"),
    [(2, "", EPOCH, "no worker"), (0, "another", EPOCH, "refused"), (0, "", "another", "epoch")],
)
def test_strangers_are_no_workers(
    job: Job, number: int, key: str, epoch: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(puller, "GIVE_UP_SECONDS", 0.5)
    with contextlib.closing(Group(job)) as group:
        address = group.leader.workers_address
        stranger = Worker(address, "a", number, epoch, key or group.key, Engine())
        with contextlib.closing(stranger):
            stranger.start()
            wait_for(lambda: stranger.status()["failure"] is not None, "it gives up")
            assert said in str(stranger.status()["failure"])
        assert group.seen() == {}, "without its workers it does not join"
