"""Deltas with real processes: the same bytes as in full, whatever goes wrong on the way."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration_tests.test_weight_sync import FAULTS, ActorProcesses, Job
from tests.integration_tests.weight_sync_actor import holds_sparse, sparse_values
from tests.patience import PATIENCE_S
from torchtitan.weight_sync.staging import StagedVersion
from torchtitan.weight_sync.wire import BUCKET_HEADER


class SparseJob(Job):
    """A trainer of which one element in 32 changes with each version."""

    dtype = "bfloat16"
    values = staticmethod(sparse_values)

    def publish(self, at_least: int = 1) -> frozenset[str]:
        """The next version, applied by at least so many actors."""
        assert self.step() == "published"
        return self.sync.wait_until_applied(self.version, PATIENCE_S, at_least=at_least).applied

    def applied(self, version: int, at_least: int = 1) -> dict[str, dict[str, Any]]:
        """Figures by actor, of at least so many."""

        def noted() -> dict[str, dict[str, Any]]:
            lines = self.journal("applied")
            return {record["actor"]: record["figures"] for record in lines if record["version"] == version}

        self.wait_for(lambda: len(noted()) >= at_least)
        return noted()

    @property
    def version_bytes(self) -> int:
        return int(self.journal("layout")[0]["bytes"])


@contextlib.contextmanager
def running(run_dir: Path, **changes: Any) -> Iterator[SparseJob]:
    job = SparseJob(run_dir, **{"delta": True, **changes})
    try:
        yield job
    finally:
        job.close()


class Engine:
    """Remembers each version that it was given, None for torn ones."""

    def __init__(self) -> None:
        self.versions: list[int | None] = []

    def __call__(self, staged: StagedVersion) -> None:
        self.versions.append(staged.version if holds_sparse(staged.tensors, staged.version) else None)


def test_deltas_make_the_same_bytes_and_every_nth_version_is_full(tmp_path: Path) -> None:
    engines = {"a": Engine(), "b": Engine()}
    with running(tmp_path, full_every=4) as job:
        for name, engine in engines.items():
            job.receive(name, engine)
        for _ in range(10):
            assert job.publish(at_least=2) == {"a", "b"}
        total = job.version_bytes
        buckets = -(-total // (64 * 1024))
        for version in range(10):
            sent = sum(record["bytes"] for record in job.journal("sent") if record["version"] == version)
            received = 0
            for figures in job.applied(version, at_least=2).values():
                if version % 4 == 0:
                    assert (figures["bytes_full"], figures["bytes_delta"]) == (total, 0)
                else:
                    # One element of two bytes in 32, and a byte that says where.
                    assert figures["bytes_full"] == 0 and 0.04 * total < figures["bytes_delta"] < 0.06 * total
                received += figures["bytes_full"] + figures["bytes_delta"]
            assert sent == received + 2 * buckets * BUCKET_HEADER.size
    assert all(engine.versions == list(range(10)) for engine in engines.values())


def test_corrupted_delta_is_refused_and_sent_again_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULTS, "corrupt:version=2,times=1")
    engine = Engine()
    with running(tmp_path) as job:
        receiver = job.receive("a", engine)
        for _ in range(4):
            assert job.publish() == {"a"}
        assert receiver.status().versions_refused == 1
        assert [record["version"] for record in job.journal("abort", at_least=1)] == [2]
        total = job.version_bytes
        # The bytes of the refused delta are in its memory now: it asks for a full version, whatever it was offered.
        assert [job.applied(version)["a"]["bytes_full"] for version in range(4)] == [total, 0, total, 0]
    assert engine.versions == [0, 1, 2, 3]


def test_new_process_gets_a_full_version(tmp_path: Path) -> None:
    with running(tmp_path) as job, contextlib.closing(ActorProcesses(job)) as actors:
        actors.start("a", values="sparse")
        job.wait_for(lambda: [actor.state for actor in job.sync.actors().values()] == ["READY"])
        assert job.publish() == {"a"}
        assert job.publish() == {"a"} and job.applied(1)["a"]["bytes_delta"] > 0
        actors.signal("a", signal.SIGKILL)
        job.wait_for(lambda: job.sync.actors()["a"].state == "EVICTED")
        job.step()
        actors.start("a", values="sparse")
        job.wait_for(lambda: job.sync.actors()["a"].version == 2)
        assert job.publish() == {"a"}
        figures = [job.applied(version)["a"] for version in (2, 3)]
        assert figures[0]["bytes_full"] == job.version_bytes and figures[1]["bytes_full"] == 0
        lines = actors.log("a")
    assert [line["held"] for line in lines] == [line["announced"] for line in lines] == [0, 1, 2, 3]


def test_deltas_go_on_with_another_courier(tmp_path: Path) -> None:
    engine = Engine()
    with running(tmp_path, max_restarts=20) as job:
        job.receive("a", engine)
        for _ in range(3):
            assert job.publish() == {"a"}
        job.sync._courier.process.kill()  # type: ignore[union-attr]
        for _ in range(3):
            assert job.publish() == {"a"}
        # The first may come in full: the new courier reports the newest snapshot before the base.
        assert [job.applied(version)["a"]["bytes_full"] for version in (4, 5)] == [0, 0]
    assert engine.versions == list(range(6))


def test_actors_behind_are_sent_in_full_or_against_what_they_hold(tmp_path: Path) -> None:
    """Not blocking, a slow and a fast actor: whatever is skipped, what is applied is whole, and slots come free."""
    slow, fast = Engine(), Engine()

    def lag(staged: StagedVersion) -> None:
        time.sleep(0.15)
        slow(staged)

    with running(tmp_path, full_every=8) as job:
        job.receive("slow", lag)
        job.receive("fast", fast)
        job.publish(at_least=2)
        for _ in range(60):
            job.step()
            time.sleep(0.02)
        while job.step() == "skipped":
            time.sleep(0.05)
        job.wait_for(lambda: all(actor.version == job.version for actor in job.sync.actors().values()))
        kinds = {record["figures"]["bytes_delta"] > 0 for record in job.journal("applied")}
        assert kinds == {True, False}
    for engine in (slow, fast):
        assert None not in engine.versions and engine.versions == sorted(engine.versions)  # type: ignore[type-var]
