"""Relay with real processes: actors pass versions on, and no fault of one reaches another's bytes."""

from __future__ import annotations

import contextlib
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration_tests.test_weight_sync import FAULTS, ActorProcesses, Job, Served, running_job
from tests.integration_tests.test_weight_sync_delta import running as running_sparse
from tests.integration_tests.weight_sync_actor import SHAPES, sparse_values
from tests.patience import PATIENCE_S
from torchtitan.weight_sync.layout_tables import Box
from torchtitan.weight_sync.staging import StagedVersion
from torchtitan.weight_sync.worker import Worker

NAMES = ("a", "b", "c", "d")


def fed_by_trainer(job: Job) -> Counter[int]:
    """version -> actors that the couriers sent it to"""
    pairs = {(record["version"], record["actor"]) for record in job.journal("sent") if "rank" in record}
    return Counter(version for version, _ in pairs)


def sources(job: Job, version: int) -> dict[str, str]:
    """actor -> from whom the version came that it applied"""
    records = [record for record in job.journal("applied") if record["version"] == version]
    return {record["actor"]: record["figures"]["source"] for record in records}


def served(lines: list[dict[str, Any]]) -> list[int]:
    """The versions of an actor's log, which must be what they were announced as."""
    assert all(line["held"] == line["announced"] for line in lines), "torn weights"
    return [line["announced"] for line in lines]


@pytest.mark.parametrize("fanout", [1, 2])
def test_trainer_sends_each_version_a_bounded_number_of_times(tmp_path: Path, fanout: int) -> None:
    engines = {name: Served() for name in NAMES}
    with running_job(tmp_path, relay=True, relay_fanout=fanout) as job:
        for name, engine in engines.items():
            job.receive(name, engine)
        for _ in range(6):
            assert job.step() == "published"
            assert job.sync.wait_until_applied(job.version, PATIENCE_S, at_least=4).applied == set(NAMES)
        total = job.journal("layout")[0]["bytes"]
        job.journal("applied", at_least=24)
        for version in range(6):
            assert 0 < fed_by_trainer(job)[version] <= fanout
            assert Counter(sources(job, version).values())["trainer"] <= fanout
        last = [record["figures"] for record in job.journal("applied") if record["version"] == 5]
        relayed = [figures for figures in last if figures["source"] != "trainer"]
        assert relayed and all((f["bytes_relayed"], f["bytes_full"]) == (total, 0) for f in relayed)
        assert not job.journal("abort") and not job.journal("evict")
    assert all(engine.versions == list(range(6)) for engine in engines.values())


def test_corrupting_source_is_caught_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In this process, where the actors run; the coordinator's checksums tell, not the source's.
    monkeypatch.setenv(FAULTS, "corrupt:phase=relay,version=2,times=2")
    engines = {name: Served() for name in NAMES}
    with running_job(tmp_path, relay=True, relay_fanout=1) as job:
        for name, engine in engines.items():
            job.receive(name, engine)
        for _ in range(4):
            job.step()
            assert job.sync.wait_until_applied(job.version, PATIENCE_S, at_least=4).applied == set(NAMES)
        aborts = job.journal("abort", at_least=2)
        assert len(aborts) == 2 and all(record["version"] == 2 and record["source"] for record in aborts)
        assert all("checksum" in record["reason"] for record in aborts)
    assert all(engine.versions == [0, 1, 2, 3] for engine in engines.values())


@pytest.mark.slow
def test_children_of_a_killed_source_are_served_by_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A relay takes about a second here, long enough to be killed in.
    monkeypatch.setenv(FAULTS, "throttle:phase=relay,bytes_per_s=700000")
    with (
        running_job(tmp_path, relay=True, relay_fanout=1) as job,
        contextlib.closing(ActorProcesses(job)) as actors,
    ):
        for name in NAMES:
            actors.start(name)
        job.wait_for(lambda: [actor.state for actor in job.sync.actors().values()].count("READY") == 4, 60)
        job.step()

        def relaying() -> str | None:
            """An actor in the middle of passing its version on."""
            for record in job.journal("offer"):
                child = job.sync.actors()[record["actor"]]
                if record["source"] and child.state == "RECEIVING" and child.version < record["version"]:
                    return str(record["source"])
            return None

        job.wait_for(lambda: relaying() is not None)
        source = relaying()
        assert source is not None
        actors.signal(source, signal.SIGKILL)
        others = set(NAMES) - {source}
        job.wait_for(lambda: all(job.sync.actors()[name].version == 0 for name in others), 60)
        assert any(f"its source {source} is gone" in record["reason"] for record in job.journal("abort"))
        # The next version goes round without it, and with it again once it has come back.
        actors.start(source)
        job.step()
        assert job.sync.wait_until_applied(1, 60, at_least=4).applied == set(NAMES)
        for name in NAMES:
            assert served(actors.log(name))[-1] == 1


class Part:
    """The engine of a worker that holds all of the small parameters and half the rows of the large one."""

    def __init__(self, worker: int):
        self.rows = (500 * worker, 500)
        self.boxes = {f"p{index}": Box((0,) * len(shape), shape) for index, shape in enumerate(SHAPES)}
        self.boxes["p1"] = Box((self.rows[0], 0), (500, 150))
        self.versions: list[int | None] = []

    def __call__(self, staged: StagedVersion) -> None:
        start, length = self.rows
        expected = {f"p{index}": sparse_values(staged.version, index) for index in range(len(SHAPES))}
        expected["p1"] = expected["p1"][start : start + length]
        intact = staged.tensors.keys() == expected.keys() and all(
            torch.equal(staged.tensors[name].float(), value) for name, value in expected.items()
        )
        self.versions.append(staged.version if intact else None)


def apply_on_workers(staged: StagedVersion) -> None:
    """The engine of a leader."""
    assert staged.apply_on_workers is not None
    staged.apply_on_workers()


def test_workers_relay_to_workers_and_what_the_trainer_sends_are_deltas(tmp_path: Path) -> None:
    """Delta, relay, streams and actors of two workers, all at once."""
    parts = {name: [Part(0), Part(1)] for name in ("a", "b")}
    with running_sparse(tmp_path, relay=True, relay_fanout=1, streams=2) as job, contextlib.ExitStack() as closing:
        for name, engines in parts.items():
            leader = job.receive(name, apply_on_workers, workers=2)
            for number, engine in enumerate(engines):
                address = leader.workers_address
                worker = Worker(address, name, number, job.epoch, job.token, engine, engine.boxes)
                worker.start()
                closing.callback(worker.close)
        job.wait_for(lambda: [actor.state for actor in job.sync.actors().values()].count("READY") == 2)
        for _ in range(6):
            assert job.publish(at_least=2) == {"a", "b"}
        for version in range(6):
            from_whom = sources(job, version)
            figures = job.applied(version)
            (direct,) = (name for name in parts if from_whom[name] == "trainer")
            (relayed,) = (name for name in parts if from_whom[name] == direct)
            assert figures[relayed]["bytes_relayed"] == figures[relayed]["bytes_resulting"] > 0
            assert (figures[direct]["bytes_full"] == 0) is (version > 0), "the base is what it has, from whomever"
        assert not job.journal("abort")
    assert all(part.versions == list(range(6)) for engines in parts.values() for part in engines)
