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
from torchtitan.report.deliveries import DeliveryBook, Incident
from torchtitan.report.sync_metrics import SyncMetrics, sums_by_actor
from torchtitan.utils.json_lines import StepRecorder, read_json_lines

Row = dict[str, Any]


class Journal:
    """A registry's journal, as it writes it, one second per line."""

    def __init__(self, run_dir: Path):
        self.path = run_dir / "weight_sync" / "registry.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        self.clock = itertools.count(1000)

    def write(self, event: str, **fields: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"time": float(next(self.clock)), "term": 1, "event": event, **fields}) + "\n")

    def start(self, epoch: str = "e1", *actors: str) -> None:
        self.write("start", pid=1, epoch=epoch)
        for actor in actors:
            self.join(actor)

    def publish(self, version: int) -> None:
        self.write("publish", version=version, serial=version + 1, digest="d")

    def pull(self, version: int, actor: str) -> None:
        self.write("pulling", actor=actor, version=version)

    def apply(self, version: int, actor: str, **figures: Any) -> None:
        self.end(version, actor, "staged", "")
        self.write("applied", actor=actor, version=version, figures={"apply_s": 0.2} | figures)

    def end(self, version: int, actor: str, outcome: str = "gone", reason: str = "why") -> None:
        self.write("ended", actor=actor, version=version, outcome=outcome, reason=reason)

    def evict(self, actor: str, phase: str) -> None:
        self.write("lost", actor=actor, phase=phase, version=0, reason="late")

    def join(self, actor: str, served: int | None = None) -> None:
        self.write("join", actor=actor, instance="i")
        if served is not None:
            self.write("serves", actor=actor, version=served, figures={})


def rows_of(run_dir: Path) -> dict[tuple[int, str | None], Row]:
    rows = read_json_lines(run_dir / "weight_sync" / "versions.jsonl")
    by_key = {(row["version"], row["actor"]): row for row in rows}
    assert len(by_key) == len(rows), "one row per version and actor"
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
    journal.evict("b", "PULLING")
    journal.write("drop", version=2, serial=3, reason="rank 1 had no free slot")
    journal.publish(3)
    journal.pull(3, "a")
    journal.apply(3, "a", **FIGURES)
    journal.publish(4)
    journal.pull(4, "a")
    journal.end(4, "a", "staged", "")
    journal.end(4, "a", "refused", "not for this model")
    journal.publish(5)
    journal.pull(5, "a")
    rows = finish(tmp_path)
    outcomes = {key: row["outcome"] for key, row in rows.items()}
    assert outcomes == {
        (0, "a"): "applied", (0, "b"): "superseded", (1, "a"): "aborted", (1, "b"): "evicted", (2, None): "dropped",
        (3, "a"): "applied", (4, "a"): "refused", (5, "a"): "pending",
    }  # fmt: skip
    applied = rows[0, "a"]
    assert {name: applied["figures"][name] for name in FIGURES} == FIGURES
    assert applied["queue_wait_s"] == 1.0 and applied["applied_at"] - applied["begun_at"] == 2.0
    assert applied["figures"]["gigabytes_per_s"] == 120 / 0.5 / 1e9
    assert rows[1, "a"]["failures"] == ["PULLING: superseded"]
    assert rows[1, "b"]["evicted_in"] == "PULLING" and rows[1, "b"]["failures"] == ["PULLING: late"]
    assert rows[2, None]["reason"] == "rank 1 had no free slot"
    assert rows[4, "a"]["failures"] == ["APPLYING: not for this model"]
    sums = sums_by_actor(tmp_path)
    assert sums["a"]["pulls"] == 5 and sums["a"]["applied"] == 2
    assert sums["a"]["bytes_delta"] == 40 and sums["a"]["corrupt_buckets"] == 2
    assert sums["a"]["transfer_s"] == 0.5 and sums["a"]["pause_s/max"] == 0.05
    assert sums["b"]["evicted_in/PULLING"] == 1 and "transfer_s" not in sums["b"]


def test_lost_acknowledgement_counts_as_applied_when_the_actor_says_so(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.start("e1", "a")
    journal.publish(1)
    journal.pull(1, "a")
    journal.end(1, "a", "staged", "")
    journal.evict("a", "APPLYING")
    journal.join("a", 1)
    journal.publish(2)
    journal.pull(2, "a")
    journal.end(2, "a", "staged", "")
    journal.evict("a", "APPLYING")
    journal.join("a", 1)  # this one it did not apply
    journal.publish(3)
    journal.pull(3, "a")
    journal.apply(3, "a")
    rows = finish(tmp_path)
    assert rows[1, "a"]["outcome"] == "applied" and rows[1, "a"]["evicted_in"] == "APPLYING"
    assert rows[2, "a"]["outcome"] == "evicted" and rows[3, "a"]["outcome"] == "applied"


def test_registries_and_launches_end_what_was_under_way(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.start("e1", "a")
    journal.publish(1)
    journal.pull(1, "a")
    journal.start("e1", "a")  # a new term of the same epoch: the attempt is over, the version may be offered again
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
    rows = read_json_lines(tmp_path / "weight_sync" / "versions.jsonl")
    assert [(row["epoch"], row["version"], row["outcome"], row["attempts"]) for row in rows] == [
        ("e1", 1, "applied", 2), ("e1", 2, "pending", 0), ("e2", 2, "applied", 1),
    ]  # fmt: skip
    assert rows[0]["failures"] == ["apply: the registry was started again"]
    told = DeliveryBook().feed(read_json_lines(journal.path))
    assert [one.kind for one in told if isinstance(one, Incident)] == ["registry restarted"]


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
    assert rows_of(tmp_path).keys() - {(version, None) for version in outcomes} == {(v, "a") for v in (1, 5, 7, 8)}


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
    assert list(empty.iterdir()) == [] and sums_by_actor(empty) == {}


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), actors=st.integers(1, 4), versions=st.integers(1, 12))
def test_sums_of_steps_are_those_of_the_run_whatever_happens(seed: int, actors: int, versions: int) -> None:
    """A random history with its outcome kept beside it; read in pieces that end anywhere, also within a line."""
    dice = random.Random(seed)
    names = [f"actor-{number}" for number in range(actors)]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        journal = Journal(run_dir)
        applied: set[tuple[int, str]] = set()
        superseded: set[tuple[int, str]] = set()
        attempts: Counter[str] = Counter()
        evictions: Counter[str] = Counter()
        waiting: dict[str, set[int]] = {name: set() for name in names}
        tried: dict[str, set[int]] = {name: set() for name in names}
        live = dict.fromkeys(names, True)
        journal.start("e1", *names)
        for version in range(versions):
            journal.publish(version)
            for name in names:
                if not live[name] and dice.random() < 0.5:
                    journal.join(name)
                    live[name] = True
                    waiting[name].add(version)
                elif live[name]:
                    waiting[name].add(version)
                if not live[name] or dice.random() < 0.4:
                    continue
                while dice.random() < 0.3:
                    journal.pull(version, name)
                    journal.end(version, name)
                    attempts[name] += 1
                    waiting[name].discard(version)
                    tried[name].add(version)
                journal.pull(version, name)
                attempts[name] += 1
                if dice.random() < 0.2:
                    phase = dice.choice(["PULLING", "APPLYING"])
                    journal.evict(name, phase)
                    evictions[phase] += 1
                    live[name] = False
                    waiting[name].discard(version)
                    tried[name].add(version)
                    continue
                journal.apply(version, name, bytes_full=version + 1, pause_s=1.0)
                applied.add((version, name))
                superseded |= {(older, name) for older in waiting[name] if older < version}
                waiting[name].clear()
                tried[name].clear()
        told_by_steps = len(superseded)
        for name in names:  # what was never tried is superseded too, but for the newest version
            ever = waiting[name] | tried[name]
            superseded |= {(version, name) for version in waiting[name] if version < max(ever)}
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
        rows = rows_of(run_dir)
        by_actor = sums_by_actor(run_dir)
    assert {key for key, row in rows.items() if row["outcome"] == "applied"} == applied
    assert {key for key, row in rows.items() if row["outcome"] == "superseded"} == superseded
    assert sum(row["attempts"] for row in rows.values()) == sum(attempts.values())
    assert totals["weight_sync/applied"] == len(applied)
    assert totals["weight_sync/superseded"] == told_by_steps
    assert totals["weight_sync/bytes_full"] == sum(version + 1 for version, _ in applied)
    assert {name.rpartition("/")[2]: count for name, count in totals.items() if "evicted_in" in name} == evictions
    for name, figures in by_actor.items():
        assert figures["pulls"] == attempts[name]
        assert figures["applied"] == sum(actor == name for _, actor in applied)


def test_records_of_no_interest_and_damaged_ones_are_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path)
    journal.write("something_newer", actor="a")
    assert finish(tmp_path) == {}
    damaged = [{"event": "pulling", "time": 1.0}, {"event": "lost", "acton": "a"}, {"event": "publish", "version": []}]
    assert list(DeliveryBook().feed(damaged)) == []
    assert caplog.text.count("a record of the weight registry is damaged, left out") == 3


@pytest.mark.parametrize(
    ("event", "fields"),
    [
        ("pulling", {}),
        ("pulling", {"actor": "a", "version": "1"}),
        ("ended", {"actor": "a", "version": 1, "outcome": "whatever", "reason": ""}),
        ("applied", {"actor": "a", "version": 1, "figures": {"bytes_full": "x"}}),
        ("applied", {"actor": "a", "version": 1, "figures": {"transfer_s": float("nan")}}),
        ("serves", {"actor": ["a"], "version": 1}),
        ("lost", {"actor": "a", "version": 1, "phase": {}}),
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


def test_what_one_actor_says_without_end_is_not_kept_without_end() -> None:
    book = DeliveryBook()
    lines: list[Row] = [{"event": "pulling", "time": 1.0, "actor": "a", "version": 7} for _ in range(1000)]
    lines += [{"event": "pulling", "time": 1.0, "actor": "a", "version": version} for version in range(5000)]
    list(book.feed(lines))
    kept = book._open["a"]
    assert len(kept) < 1100 and all(len(delivery.attempts) <= 101 for delivery in kept.values())


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
            journal.end(version, "evil", "lost", "\n" + "x" * 499)
        journal.pull(version, "good")
        journal.apply(version, "good")
    metrics = SyncMetrics(tmp_path) if metrics is None else metrics
    metrics.close()
    path = tmp_path / "weight_sync" / "versions.jsonl"
    lines = path.read_text().splitlines()
    assert path.stat().st_size <= 20_000 and max(map(len, lines)) < 8 * 250 + 2000
    rows = [json.loads(line) for line in lines]
    assert {row["version"] for row in rows} >= {28, 29}
    (evil,) = [row for row in rows if row["version"] == 28 and row["actor"] == "evil"]
    assert evil["attempts"] == 50 and len(evil["failures"]) == 8
