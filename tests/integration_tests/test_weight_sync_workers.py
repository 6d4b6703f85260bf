"""Actors of several workers: every byte of each part, and all of them or none, whoever dies when."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration_tests.test_weight_sync import FAULTS, REPOSITORY, Job, running_job
from tests.integration_tests.weight_sync_worker import WORKERS
from tests.patience import PATIENCE_S
from torchtitan.weight_sync.receiver import Receiver
from torchtitan.weight_sync.staging import StagedVersion, WeightsRefused
from torchtitan.weight_sync.wire import TOKEN_VARIABLE
from torchtitan.weight_sync.worker import Worker


class Group:
    """The leader in this process, its workers in processes of their own."""

    def __init__(self, job: Job, name: str):
        self.job, self.name = job, name
        self.served: list[int] = []
        self.hold = job.run_dir / "hold"
        self.leader = job.receive(name, self._apply, workers=WORKERS)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        for number in range(WORKERS):
            self.start(number)

    def _apply(self, staged: StagedVersion) -> None:
        assert staged.tensors == {} and staged.apply_on_workers is not None
        staged.apply_on_workers()
        self.served.append(staged.version)

    def start(self, number: int) -> None:
        arguments = {
            "leader": self.leader.workers_address,
            "actor": self.name,
            "worker": number,
            "epoch": self.job.epoch,
            "log": str(self.job.run_dir / f"worker-{number}.jsonl"),
            "hold": str(self.hold),
        }
        self.processes[number] = subprocess.Popen(
            [sys.executable, "-m", "tests.integration_tests.weight_sync_worker", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            cwd=REPOSITORY,
            env={**os.environ, TOKEN_VARIABLE: self.job.token, "OMP_NUM_THREADS": "1"},
        )

    def restart(self, number: int) -> None:
        self.processes[number].kill()
        self.processes[number].wait(PATIENCE_S)
        self.start(number)

    def log(self, number: int) -> list[dict[str, Any]]:
        path = self.job.run_dir / f"worker-{number}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def applied(self, number: int) -> list[int]:
        return [line["version"] for line in self.log(number) if "version" in line]

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(PATIENCE_S)


@pytest.mark.slow
@pytest.mark.parametrize("streams", [1, 3])
def test_workers_die_and_nothing_is_torn(streams: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A version takes about half a second, so that a kill hits the transfer.
    monkeypatch.setenv(FAULTS, "throttle:version=1-2,bytes_per_s=1000000")
    changes = {"streams": streams, "apply_timeout_s": 20.0}
    with running_job(tmp_path, **changes) as job, contextlib.closing(Group(job, "a")) as group:
        job.step()
        assert job.sync.wait_until_applied(0, 60, at_least=1).applied == {"a"}
        assert [group.applied(number) for number in range(WORKERS)] == [[0], [0]]
        (applied,) = job.journal("applied", at_least=1)
        assert applied["figures"]["bytes_full"] > 0 and applied["figures"]["source"] == "trainer"
        job.step()
        job.wait_for(lambda: job.sync.actors()["a"].state == "RECEIVING")
        time.sleep(0.1)
        group.restart(1)
        assert job.sync.wait_until_applied(1, 60, at_least=1).applied == {"a"}
        reasons = [record["reason"] for record in job.journal("evict", at_least=1)]
        assert reasons and group.served == [0, 1]

        group.hold.touch()
        job.step()
        job.wait_for(lambda: all({"begun": 2} in group.log(number) for number in range(WORKERS)))
        group.processes[0].send_signal(signal.SIGKILL)
        job.wait_for(lambda: group.leader.poisoned)
        assert group.leader.served is None and group.served == [0, 1]
        group.hold.unlink()
        group.restart(0)
        job.step()
        job.wait_for(lambda: job.sync.actors()["a"].version == 3, 40)
        assert not group.leader.poisoned and group.served[-1] == 3
        published = {record["digest"]: record["version"] for record in job.journal("publish")}
        for number in range(WORKERS):
            lines = [line for line in group.log(number) if "version" in line]
            assert lines[-1]["version"] == 3
            assert all(line["intact"] and published[line["digest"]] == line["version"] for line in lines)


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


def test_a_split_poisons_the_actor_until_all_have_applied(tmp_path: Path) -> None:
    served: list[int] = []

    def apply(staged: StagedVersion) -> None:
        assert staged.apply_on_workers is not None
        staged.apply_on_workers()
        served.append(staged.version)

    engines = [Engine(), Engine()]
    with running_job(tmp_path) as job, contextlib.ExitStack() as stack:
        leader = job.receive("a", apply, workers=2)
        for number, engine in enumerate(engines):
            worker = Worker(leader.workers_address, "a", number, job.epoch, job.token, engine, None)
            stack.callback(worker.close)
            worker.start()
        job.step()
        assert job.sync.wait_until_applied(0, PATIENCE_S, at_least=1).applied == {"a"}
        # One fails after the other has applied: poisoned, and all get the same version once more.
        engines[1].raises = MemoryError("half-way")
        job.step()
        job.wait_for(lambda: served == [0, 1])
        assert ["worker 1: MemoryError" in record["reason"] for record in job.journal("poisoned", at_least=1)] == [True]
        assert engines[0].versions == [0, 1, 1] and engines[1].versions == [0, 1]
        # All refuse: the actor is as it was. One refuses after the other has applied: poisoned.
        for engine in engines:
            engine.raises = WeightsRefused("not this one")
        job.step()
        job.wait_for(lambda: served == [0, 1, 2])
        assert len(job.journal("refused", at_least=1)) == 1 and len(job.journal("poisoned", at_least=1)) == 1
        engines[0].raises = WeightsRefused("not this one")
        job.step()
        job.wait_for(lambda: served == [0, 1, 2, 3])
        assert len(job.journal("refused", at_least=1)) == 1 and len(job.journal("poisoned", at_least=2)) == 2


def test_an_engine_that_forgets_its_workers_is_poisoned(tmp_path: Path) -> None:
    engines = [Engine(), Engine()]
    with running_job(tmp_path) as job, contextlib.ExitStack() as stack:
        leader = job.receive("a", lambda _staged: None, workers=2)
        for number, engine in enumerate(engines):
            worker = Worker(leader.workers_address, "a", number, job.epoch, job.token, engine, None)
            stack.callback(worker.close)
            worker.start()
        job.step()
        job.wait_for(lambda: leader.poisoned)
        assert [engine.versions for engine in engines] == [[], []]


def test_workers_of_another_actor_or_number_are_refused(tmp_path: Path) -> None:
    with running_job(tmp_path) as job:
        leader = job.receive("a", lambda _staged: None, workers=1)
        for actor, number in (("b", 0), ("a", 1)):
            stranger = Worker(
                leader.workers_address, actor, number, job.epoch, job.token, Engine(), None, retry_for_s=0.5
            )
            stranger.start()
            job.wait_for(lambda stranger=stranger: stranger.status().failure is not None)  # type: ignore[misc]
            assert "refused" in str(stranger.status().failure)
            stranger.close()
        assert job.sync.actors() == {}, "without its workers it does not join"


def test_only_a_leader_has_an_address_for_workers() -> None:
    receiver = Receiver("127.0.0.1:1", "a", "e", "token", lambda _staged: None)
    with pytest.raises(ValueError, match="no workers"):
        _ = receiver.workers_address
    receiver.close()
