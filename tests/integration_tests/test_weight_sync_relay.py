"""Relay with real processes: actors pass versions on, and no fault of one reaches another's bytes."""

from __future__ import annotations

import contextlib
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.integration_tests.test_weight_sync import FAULTS, ActorProcesses, Job, Served, running_job

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


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fanout", [1, 2])
def test_trainer_sends_each_version_a_bounded_number_of_times(tmp_path: Path, fanout: int) -> None:
    engines = {name: Served() for name in NAMES}
    with running_job(tmp_path, relay=True, relay_fanout=fanout) as job:
        for name, engine in engines.items():
            job.receive(name, engine)
        for _ in range(6):
            assert job.step() == "published"
            assert job.sync.wait_until_applied(job.version, 20, at_least=4).applied == set(NAMES)
        total = job.journal("layout")[0]["bytes"]
        for version in range(6):
            assert 0 < fed_by_trainer(job)[version] <= fanout
            assert Counter(sources(job, version).values())["trainer"] <= fanout
        last = [record["figures"] for record in job.journal("applied") if record["version"] == 5]
        relayed = [figures for figures in last if figures["source"] != "trainer"]
        assert relayed and all((f["bytes_relayed"], f["bytes_full"]) == (total, 0) for f in relayed)
        assert not job.journal("abort") and not job.journal("evict")
    assert all(engine.versions == list(range(6)) for engine in engines.values())


@pytest.mark.timeout(120)
def test_corrupting_source_is_caught_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In this process, where the actors run; the coordinator's checksums tell, not the source's.
    monkeypatch.setenv(FAULTS, "corrupt:phase=relay,version=2,times=2")
    engines = {name: Served() for name in NAMES}
    with running_job(tmp_path, relay=True, relay_fanout=1) as job:
        for name, engine in engines.items():
            job.receive(name, engine)
        for _ in range(4):
            job.step()
            assert job.sync.wait_until_applied(job.version, 20, at_least=4).applied == set(NAMES)
        aborts = job.journal("abort")
        assert len(aborts) == 2 and all(record["version"] == 2 and record["source"] for record in aborts)
        assert all("checksum" in record["reason"] for record in aborts)
    assert all(engine.versions == [0, 1, 2, 3] for engine in engines.values())


@pytest.mark.timeout(180)
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
