"""Figures per version and actor, from journals whose outcome is known."""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.report import sync_metrics
from torchtitan.report.deliveries import Incident, JournalReader
from torchtitan.report.sync_metrics import SyncMetrics, read_journal, sums_by_actor
from torchtitan.utils.json_lines import StepRecorder, read_json_lines
from torchtitan.weight_sync.actor_state import ActorState
from torchtitan.weight_sync.registry import deliveries
from torchtitan.weight_sync.registry.deliveries import Deliveries, Outcome

Row = dict[str, Any]


class Journal:
    """A registry's journal, as it writes it, one second per line."""

    def __init__(self, run_dir: Path):
        self.path = run_dir / "weight_sync" / "registry.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        self.clock = itertools.count(1000)
        self.time = 0.0
        self.live: set[str] = set()
        self.newest: int | None = None
        self.deliveries = Deliveries("", lambda: self.time, self._append)

    def write(self, event: str, **fields: Any) -> None:
        self._tick()
        self._append(event, fields)

    def _tick(self) -> None:
        self.time = float(next(self.clock))

    def _append(self, event: str, fields: Row) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"time": self.time, "term": 1, "event": event, **fields}) + "\n")

    def start(self, epoch: str = "e1", *actors: str) -> None:
        self.write("start", pid=1, epoch=epoch)
        self.deliveries = Deliveries(epoch, lambda: self.time, self._append)
        self.live, self.newest = set(), None
        for actor in actors:
            self.join(actor)

    def publish(self, version: int) -> None:
        self.write("publish", version=version, serial=version + 1, digest="d")
        self.newest = version
        self.deliveries.offer(version, sorted(self.live))

    def pull(self, version: int, actor: str) -> None:
        self._tick()
        self.deliveries.begin(actor, version)

    def stage(self, version: int, actor: str) -> None:
        self._tick()
        self.deliveries.stage(actor, version)

    def apply(self, version: int, actor: str, **figures: Any) -> None:
        self.stage(version, actor)
        self._tick()
        self.deliveries.serves(actor, version, {"apply_s": 0.2} | figures)

    def end(self, version: int, actor: str, outcome: Outcome = "aborted", reason: str = "why") -> None:
        self._tick()
        self.deliveries.end(actor, version, outcome, reason)

    def evict(self, actor: str, state: str) -> None:
        self.write("evicted", actor=actor, state=state, version=0, reason="late")
        self.live.discard(actor)
        self.deliveries.evict(actor, "late")

    def join(self, actor: str, served: int | None = None) -> None:
        self.write("join", actor=actor, instance="i")
        self.live.add(actor)
        if self.newest is not None:
            self.deliveries.offer(self.newest, [actor])
        if served is not None:
            self._tick()
            self.deliveries.serves(actor, served, {})


def list_of(run_dir: Path) -> list[Row]:
    return read_json_lines(run_dir / "weight_sync" / "versions.jsonl")


def rows_of(run_dir: Path) -> dict[tuple[int, str | None], Row]:
    rows = list_of(run_dir)
    by_key = {(row["version"], row["actor"]): row for row in rows}
    assert len(by_key) == len(rows), "no actor pulls a version twice here"
    return by_key


def finish(run_dir: Path) -> dict[tuple[int, str | None], Row]:
    SyncMetrics(run_dir).close()
    return rows_of(run_dir)


FIGURES = {
    "transfer_s": 0.5, "apply_s": 0.2, "pause_s": 0.05,
    "bytes_full": 100, "bytes_delta": 20, "bytes_relayed": 0, "corrupt_buckets": 1, "source": "actor-9",
}  # fmt: skip


def test_every_outcome_has_its_row(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.start("e1", "a", "b")
    journal.publish(0)
    journal.pull(0, "a")
    journal.apply(0, "a", **FIGURES)
    journal.publish(1)  # b was offered nothing yet
    journal.pull(1, "a")
    journal.end(1, "a", reason="superseded")
    journal.pull(1, "b")
    journal.write("lost_snapshot", actor="b", version=0, times=1)
    journal.evict("b", "pulling")
    journal.write("drop", version=2, serial=3, reason="rank 1 had no free slot")
    journal.publish(3)
    journal.pull(3, "a")
    journal.apply(3, "a", **FIGURES)
    journal.publish(4)
    journal.pull(4, "a")
    journal.stage(4, "a")
    journal.end(4, "a", "refused", "not for this model")
    journal.publish(5)  # which a is about to have when the run ends
    journal.pull(5, "a")
    rows = finish(tmp_path)
    outcomes = {key: row["outcome"] for key, row in rows.items()}
    assert outcomes == {
        (0, "a"): "applied", (0, "b"): "superseded", (1, "a"): "aborted", (1, "b"): "evicted", (2, None): "dropped",
        (3, "a"): "applied", (4, "a"): "refused",
    }  # fmt: skip
    applied = rows[0, "a"]
    assert {name: applied["figures"][name] for name in FIGURES} == FIGURES
    assert applied["queue_wait_s"] == 1.0 and applied["ended_at"] - applied["begun_at"] == 2.0
    assert applied["staged_at"] - applied["begun_at"] == 1.0
    assert applied["figures"]["gigabytes_per_s"] == 120 / 0.5 / 1e9
    assert (rows[1, "a"]["state"], rows[1, "a"]["reason"]) == (ActorState.PULLING, "superseded")
    assert (rows[1, "b"]["state"], rows[1, "b"]["reason"]) == (ActorState.PULLING, "late")
    assert rows[2, None]["reason"] == "rank 1 had no free slot"
    assert (rows[4, "a"]["state"], rows[4, "a"]["reason"]) == (ActorState.APPLYING, "not for this model")
    sums = sums_by_actor(read_journal(tmp_path))
    assert sums["a"]["pulls"] == 4 and sums["a"]["applied"] == 2
    assert sums["a"]["bytes_delta"] == 40 and sums["a"]["corrupt_buckets"] == 2
    assert sums["a"]["transfer_s"] == 0.5 and sums["a"]["pause_s/max"] == 0.05
    assert sums["b"]["evicted_in/pulling"] == 1 and "transfer_s" not in sums["b"]


def test_version_is_applied_when_the_actor_that_was_evicted_meanwhile_says_so(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.start("e1", "a")
    journal.publish(1)
    journal.pull(1, "a")
    journal.stage(1, "a")
    journal.evict("a", "applying")
    journal.join("a", 1)
    journal.publish(2)
    journal.pull(2, "a")
    journal.stage(2, "a")
    journal.evict("a", "applying")
    journal.join("a", 1)  # this one it did not apply
    journal.publish(3)
    journal.pull(3, "a")
    journal.apply(3, "a")
    journal.evict("a", "ready")
    journal.join("a", 3)  # only its connection was lost
    SyncMetrics(tmp_path).close()
    rows = [(row["version"], row["outcome"], row["state"], row["attempt"]) for row in list_of(tmp_path)]
    assert rows == [(1, "evicted", "applying", 1), (1, "applied", "", 0), (2, "evicted", "applying", 1),
                    (3, "applied", "", 1)]  # fmt: skip


def test_version_that_actors_serve_when_the_registry_is_started_again_has_one_row(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    metrics = SyncMetrics(tmp_path)
    journal.start("e1", "a", "b")
    for version in (1, 2):
        journal.publish(version)
        journal.pull(version, "a")
        journal.apply(version, "a")
    journal.pull(2, "b")
    journal.start("e1")
    journal.publish(2)
    journal.join("a", 2)
    journal.join("b", 2)  # it was applied while there was no registry
    journal.start("e2")
    journal.publish(2)
    journal.join("a", 2)
    assert metrics.step({"policy_version": 2})["weight_sync/applied"] == 4
    metrics.close()
    rows = [(row["epoch"], row["version"], row["actor"]) for row in list_of(tmp_path) if row["outcome"] == "applied"]
    assert rows == [("e1", 1, "a"), ("e1", 2, "a"), ("e1", 2, "b"), ("e2", 2, "a")]


def test_rows_of_two_registries_and_two_launches_are_told_apart(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.start("e1", "a")
    journal.publish(1)
    journal.pull(1, "a")
    journal.start("e1", "a")  # a new term of the same epoch: what the first one had seen is lost
    journal.publish(1)
    journal.pull(1, "a")
    journal.apply(1, "a")
    with journal.path.open("a") as file:
        file.write('{"time": 5, "ev')  # killed while it wrote
        file.write("\n")
    journal.publish(2)
    journal.start("e2", "a")
    journal.publish(2)
    journal.pull(2, "a")
    journal.apply(2, "a")
    SyncMetrics(tmp_path).close()
    rows = [(row["epoch"], row["version"], row["outcome"], row["attempt"]) for row in list_of(tmp_path)]
    assert rows == [("e1", 1, "applied", 1), ("e2", 2, "applied", 1)]
    entries = JournalReader().feed(read_json_lines(journal.path))
    assert [entry.kind for entry in entries if isinstance(entry, Incident)] == ["registry restarted"]


def test_the_trainers_own_figures_and_skipped_versions(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    metrics = SyncMetrics(tmp_path)
    journal.start("e1", "a")
    journal.publish(1)
    row: Row = {"policy_version": 1, "time/snapshot_s": 0.01, "time/sync_stall_s": 0.002}
    first = metrics.step(row | {"weight_sync/versions_skipped": 0}, [(1, 10.0, 10.5)])
    assert first["weight_sync/snapshot_s"] == 0.5
    assert first["weight_sync/pulls"] == first["weight_sync/applied"] == 0
    assert "weight_sync/transfer_s" not in first, "no mean of nothing"
    metrics.step({"policy_version": 2, "weight_sync/versions_skipped": 1})
    journal.pull(1, "a")
    journal.apply(1, "a", **FIGURES)
    third = metrics.step({"policy_version": 3, "weight_sync/versions_skipped": 1})
    assert third["weight_sync/applied"] == 1 and third["weight_sync/queue_wait_s"] == 1.0
    assert third["weight_sync/bytes_full"] == 100
    # On the disk before the run goes on: a kill costs nothing that had been decided.
    rows = rows_of(tmp_path)
    metrics.close()
    metrics.close()
    assert rows == rows_of(tmp_path)
    assert rows[1, "a"]["snapshot_s"] == 0.5 and rows[1, "a"]["sync_stall_s"] == 0.012
    assert rows[2, None]["outcome"] == "skipped" and (3, None) not in rows


@pytest.mark.parametrize("resumed", [False, True])
def test_every_version_has_a_row_also_one_that_a_newer_one_has_overtaken(tmp_path: Path, resumed: bool) -> None:
    journal = Journal(tmp_path)
    metrics = SyncMetrics(tmp_path)
    journal.start("e1", "a")
    rows: list[Row] = []

    def step(version: int, skipped: int = 0) -> None:
        rows.append({"policy_version": version, "weight_sync/versions_skipped": skipped})
        metrics.step(rows[-1])

    step(1)
    journal.publish(1)
    # The servers are away while 2 and 3 are made. Of 3 a rank says in time that it lacks it; 4 is skipped.
    step(2)
    step(3)
    journal.start("e1", "a")
    journal.write("drop", version=3, serial=4, reason="rank 1 did not snapshot it in time")
    step(4, skipped=1)
    assert {key for key in rows_of(tmp_path) if key[1] is None} == {(3, None), (4, None)}
    journal.publish(5)
    step(5, skipped=1)
    step(6, skipped=1)
    journal.publish(7)
    # The journal may be ahead of the trainer's rows.
    step(7, skipped=1)
    journal.publish(8)
    metrics.close()
    if resumed:
        metrics = SyncMetrics(tmp_path, rows)
        metrics.close()
    outcomes = {version: row["outcome"] for (version, actor), row in rows_of(tmp_path).items() if actor is None}
    assert outcomes == {2: "overtaken", 3: "dropped", 4: "skipped", 6: "overtaken"}


def test_a_version_made_again_after_a_resume_is_not_overtaken_by_one_of_the_launch_before(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.start("e1", "a")
    for version in (1, 3):
        journal.publish(version)
    # The run was killed, and goes on from step 1. Of 2, the registry has not heard yet.
    metrics = SyncMetrics(tmp_path, [{"policy_version": 1}])
    journal.start("e2", "a")
    metrics.step({"policy_version": 2})
    assert (2, None) not in rows_of(tmp_path)
    journal.publish(2)
    metrics.close()
    assert (2, None) not in rows_of(tmp_path)


@pytest.mark.parametrize("is_whole", [False, True])
def test_versions_of_a_lost_part_of_the_journal_are_not_overtaken(tmp_path: Path, is_whole: bool) -> None:
    """A long journal loses its oldest part, while metrics.jsonl is there from the first step."""
    journal = Journal(tmp_path)
    if is_whole:
        journal.start("e1")
    for version in (98, 100):
        journal.publish(version)
    metrics = SyncMetrics(tmp_path, [{"policy_version": version} for version in range(1, 101)])
    metrics.close()
    expected = {*range(1, 98), 99} if is_whole else {99}
    assert {version for version, _ in rows_of(tmp_path)} == expected


def test_a_thread_computes_the_same_while_the_trainer_goes_on(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    metrics = SyncMetrics(tmp_path)
    journal.start("e1", "a")
    totals: Counter[str] = Counter()
    for version in range(1, 6):
        journal.publish(version)
        journal.pull(version, "a")
        journal.apply(version, "a", **FIGURES)
        row = {"policy_version": version, "time/snapshot_s": 0.01 * version}
        totals.update(metrics.step_behind(row, [(version, 1.0, 1.5)]))
        if version == 3:
            assert metrics._behind is not None
            metrics._behind.result()
    assert 0 < totals["weight_sync/applied"] <= 5
    metrics.close()
    rows = rows_of(tmp_path)
    assert [rows[version, "a"]["outcome"] for version in range(1, 6)] == ["applied"] * 5
    assert rows[1, "a"]["sync_stall_s"] == 0.01
    empty = tmp_path / "replay"
    empty.mkdir()
    assert SyncMetrics(empty).step_behind({"policy_version": 1}) == {}


def test_a_resumed_run_keeps_the_rows_of_its_earlier_life_and_a_replay_has_none(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.start("e1", "a")
    for version in (1, 2):
        journal.publish(version)
        journal.pull(version, "a")
        journal.apply(version, "a", pause_s=float(version))
    first = finish(tmp_path)
    earlier = [{"policy_version": 2, "time/snapshot_s": 0.5}, {"policy_version": 2, "eval/version": 2}]
    recorder = StepRecorder(tmp_path, 0)
    recorder.end_step(2, [(2, 1.0, 3.0)])
    recorder.close()
    resumed = SyncMetrics(tmp_path, earlier)
    journal.start("e2", "a")
    journal.publish(3)
    journal.pull(3, "a")
    journal.apply(3, "a", pause_s=7.0)
    sums = resumed.step({"policy_version": 3})
    assert sums["weight_sync/applied"] == 1 and sums["weight_sync/pause_s"] == 7.0
    resumed.close()
    rows = rows_of(tmp_path)
    assert len(first) == 2 and [row["epoch"] for row in rows.values()] == ["e1", "e1", "e2"]
    assert rows[2, "a"]["snapshot_s"] == 2.0 and rows[2, "a"]["sync_stall_s"] == 0.5
    empty = tmp_path / "replay"
    empty.mkdir()
    metrics = SyncMetrics(empty)
    assert metrics.step({"policy_version": 1}) == {}
    metrics.close()
    assert list(empty.iterdir()) == [] and sums_by_actor(read_journal(empty)) == {}


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), actors=st.integers(1, 4), versions=st.integers(1, 12))
def test_sums_of_steps_are_those_of_the_run_whatever_happens(seed: int, actors: int, versions: int) -> None:
    """A random history with its outcome kept beside it; read in pieces that end anywhere, also within a line."""
    dice = random.Random(seed)
    names = [f"actor-{number}" for number in range(actors)]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        journal = Journal(run_dir)
        expected: Counter[tuple[int, str, str]] = Counter()
        evictions: Counter[str] = Counter()
        waiting: dict[str, set[int]] = {name: set() for name in names}
        journal.start("e1", *names)
        for version in range(versions):
            journal.publish(version)
            for name in names:
                if name not in journal.live and dice.random() < 0.5:
                    journal.join(name)
                    waiting[name].add(version)
                elif name in journal.live:
                    waiting[name].add(version)
                if name not in journal.live or dice.random() < 0.4:
                    continue
                expected.update((older, name, "superseded") for older in waiting[name] if older < version)
                waiting[name].clear()
                while dice.random() < 0.3:
                    journal.pull(version, name)
                    journal.end(version, name)
                    expected[version, name, "aborted"] += 1
                journal.pull(version, name)
                if dice.random() < 0.2:
                    state = dice.choice(["pulling", "applying"])
                    journal.evict(name, state)
                    evictions[state] += 1
                    expected[version, name, "evicted"] += 1
                else:
                    journal.apply(version, name, bytes_full=version + 1, pause_s=1.0)
                    expected[version, name, "applied"] += 1
        whole = journal.path.read_bytes()
        journal.path.unlink()
        metrics = SyncMetrics(run_dir)
        totals: Counter[str] = Counter()
        cuts = [*sorted(dice.randrange(len(whole) + 1) for _ in range(5)), len(whole)]
        for begin, end in itertools.pairwise([0, *cuts]):
            with journal.path.open("ab") as file:
                file.write(whole[begin:end])
            totals.update(metrics.step({"policy_version": 0}))
        metrics.close()
        rows = list_of(run_dir)
        by_actor = sums_by_actor(read_journal(run_dir))
    for (version, name, outcome), count in list(expected.items()):
        if outcome == "aborted":
            expected[version, name, outcome] = min(count, deliveries.MAX_IN_VAIN)
    assert Counter((row["version"], row["actor"], row["outcome"]) for row in rows) == expected
    for outcome in sync_metrics.OUTCOMES:
        counted = sum(count for key, count in expected.items() if key[2] == outcome)
        assert totals[f"weight_sync/{outcome}"] == counted
    applied = [version for version, _, outcome in expected.elements() if outcome == "applied"]
    assert totals["weight_sync/bytes_full"] == sum(version + 1 for version in applied)
    assert {name.rpartition("/")[2]: count for name, count in totals.items() if "evicted_in" in name} == evictions
    for name, figures in by_actor.items():
        of_actor = {key: count for key, count in expected.items() if key[1] == name}
        assert figures["applied"] == sum(count for key, count in of_actor.items() if key[2] == "applied")
        assert figures["pulls"] == sum(count for key, count in of_actor.items() if key[2] != "superseded")


def test_records_of_no_interest_and_damaged_ones_are_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path)
    journal.write("something_newer", actor="a")
    assert finish(tmp_path) == {}
    damaged = [
        {"event": "delivery", "time": 1.0},
        {"event": "evicted", "acton": "a"},
        {"event": "publish", "version": []},
    ]
    assert list(JournalReader().feed(damaged)) == []
    assert caplog.text.count("a record of the weight registry is damaged, left out") == 3


@pytest.mark.parametrize(
    ("event", "fields"),
    [
        ("delivery", {}),
        ("delivery", {"actor": "a", "version": "1", "outcome": "applied"}),
        ("delivery", {"actor": "a", "version": 1, "outcome": 7, "epoch": "e1", "ended_at": 5.0}),
        ("delivery", {"actor": "a", "version": 1, "outcome": "applied", "figures": {"bytes_full": "x"}}),
        ("delivery", {"actor": "a", "version": 1, "outcome": "applied", "figures": {"transfer_s": float("nan")}}),
        ("delivery", {"actor": "a", "version": 1, "outcome": "applied", "epoch": "e1", "ended_at": "now"}),
        ("publish", {"version": ["a"]}),
        ("evicted", {"actor": "a", "version": 1, "state": {}}),
    ],
)
def test_a_line_that_makes_no_sense_ends_no_run_and_keeps_none_from_being_resumed(
    tmp_path: Path, event: str, fields: dict[str, Any]
) -> None:
    journal = Journal(tmp_path)
    journal.start("e1", "a")
    journal.publish(1)
    metrics = SyncMetrics(tmp_path)
    journal.pull(1, "a")
    journal.write(event, **fields)
    metrics.step({"policy_version": 1})
    journal.apply(1, "a", bytes_full=7)
    assert metrics.step({"policy_version": 2})["weight_sync/bytes_full"] == 7
    metrics.close()
    again = SyncMetrics(tmp_path)
    again.close()
    (row,) = read_json_lines(tmp_path / "weight_sync" / "versions.jsonl")
    assert (row["outcome"], row["figures"]["bytes_full"]) == ("applied", 7)


def test_deliveries_of_an_actor_that_takes_nothing_are_bounded() -> None:
    rows: list[Row] = []
    book = Deliveries("e1", lambda: 1.0, lambda _event, row: rows.append(row))
    for version in range(5000):
        book.offer(version, ["slow"])
        # This one asks again and again, and not in order.
        book.begin("evil", version % 2)
    assert len(book._offered["slow"]) <= deliveries.MAX_OFFERED
    assert Counter(row["actor"] for row in rows) == {
        "slow": 5000 - deliveries.MAX_OFFERED, "evil": 1 + deliveries.MAX_IN_VAIN,
    }  # fmt: skip


@pytest.mark.parametrize("resumed", [False, True])
def test_rows_and_their_file_are_bounded_whatever_one_actor_says(
    tmp_path: Path, resumed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_metrics, "VERSIONS_BYTES", 20_000)
    journal = Journal(tmp_path)
    journal.start("e1", "evil", "good")
    metrics = None if resumed else SyncMetrics(tmp_path)
    for version in range(30):
        journal.publish(version)
        for _ in range(50):
            journal.pull(version, "evil")
            journal.end(version, "evil", "aborted", "\n" + "x" * 499)
        journal.pull(version, "good")
        journal.apply(version, "good")
    metrics = SyncMetrics(tmp_path) if metrics is None else metrics
    metrics.close()
    path = tmp_path / "weight_sync" / "versions.jsonl"
    lines = path.read_text().splitlines()
    assert path.stat().st_size <= 20_000 and max(map(len, lines)) < 2000
    actors = Counter(row["actor"] for row in map(json.loads, lines) if row["version"] == 29)
    assert actors == {"good": 1, "evil": deliveries.MAX_IN_VAIN}
