"""Actors of several workers, as real processes: all apply or none counts, whoever dies or freezes when."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.integration_tests import weight_sync_worker
from tests.integration_tests.test_pulling import EPOCH, Job, wait_for
from tests.integration_tests.weight_sync_worker import WORKERS
from tests.patience import PATIENCE_S
from tests.processes import fork
from torchtitan.weight_sync.actor.actor import SyncActor
from torchtitan.weight_sync.memory.staging import StagedVersion
from torchtitan.weight_sync.wire.handshake import ACTOR, role_key


class Group:
    """The leader in this process, its workers in processes of their own."""

    def __init__(self, job: Job, shares: bool = True):
        self.shares = shares
        self.job, self.hold, self.served = job, job.folder / "hold", list[int]()
        self.key = role_key(job.token, ACTOR, "a")
        registry = job.publication.registry_address
        self.leader = SyncActor(registry, "a", EPOCH, self.key, self._apply, workers=WORKERS)
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


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path, apply_timeout_s=20.0)
    yield made
    made.close()


@pytest.mark.parametrize("shares", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
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
