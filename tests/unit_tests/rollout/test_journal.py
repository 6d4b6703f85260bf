"""Batches as bytes, and the record of a run: whatever happens to the process, what was recorded comes back whole."""

from __future__ import annotations

import json
import math
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trajectories import completion_of, single_turn
from torchtitan.errors import UserError
from torchtitan.inference.types import Branch, Completion, Given, VersionSpan
from torchtitan.rollout.flow.journal import (
    JOURNAL_NAME,
    Journal,
    ReplaySource,
    decode_batch,
    encode_batch,
    read_records,
)
from torchtitan.rollout.types import Batch, Group, Sample

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=6)
float32 = st.floats(width=32, allow_nan=False)
finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    length = draw(st.integers(0, 5))
    values = float32 if draw(st.booleans()) else st.floats(allow_nan=False)
    spans = [
        VersionSpan(draw(st.sampled_from(["e1", "e2", "ü"])), draw(st.integers(0, 2**40)), i, i + 1)
        for i in range(draw(st.integers(0, 3)))
    ]
    return Completion(
        token_ids=draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)),
        log_probs=draw(st.lists(values, min_size=length, max_size=length)),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        spans=spans,
        kept_token_ids=draw(st.none() | st.lists(tokens, max_size=3)),
    )


@st.composite
def samples(draw: st.DrawFn, prompt: list[int]) -> Sample:
    """Of a turn or several, in a branch or several, which all begin with the group's prompt."""
    later = st.lists(completions() | tokens.map(Given), max_size=4)
    branches = [Branch([Given(prompt), *draw(later)]) for _ in range(draw(st.integers(1, 3)))]
    return Sample(
        branches=branches,
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        reward=draw(finite),
        rewards=draw(st.dictionaries(st.text(max_size=4), st.none() | finite, max_size=3)),
        advantage=draw(st.just(0.0) | finite),
        turn_rewards=draw(st.lists(finite, max_size=3)),
        extra=draw(st.dictionaries(st.text(max_size=3), finite | st.text(max_size=3) | st.none(), max_size=2)),
    )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    groups = []
    for index in draw(st.lists(st.integers(0, 2**40), max_size=3)):
        prompt = draw(tokens)
        source, from_pass = draw(st.sampled_from(["", "sums"])), draw(st.booleans())
        groups.append(Group(index, draw(st.lists(samples(prompt), min_size=1, max_size=3)), source, from_pass))
    return Batch(draw(st.integers(0, 10**9)), groups, draw(st.dictionaries(st.text(max_size=4), finite, max_size=3)))


@pytest.mark.slow
@given(batches())
@settings(max_examples=150)
def test_batches_survive_the_trip_to_the_last_bit(batch: Batch) -> None:
    data = encode_batch(batch)
    assert b"\n" not in data
    decoded = decode_batch(data)
    assert decoded == batch
    # == takes 0.0 for -0.0; bits do not.
    bits = [[struct.pack("<d", value) for value in sample.log_probs] for sample in batch.samples]
    assert [[struct.pack("<d", value) for value in sample.log_probs] for sample in decoded.samples] == bits


def test_a_batch_of_before_passes_were_recorded_is_read() -> None:
    batch = make_batch(3)
    data = json.loads(encode_batch(batch))
    del data["from_pass"]
    assert decode_batch(json.dumps(data).encode()) == batch


def make_batch(version: int) -> Batch:
    sample = single_turn([1, 2], [3], [-0.25], [VersionSpan("e", version, 0, 1)], "stop", 1.0, {"r": 1.0})
    return Batch(version, [Group(version * 2, [sample, sample])], {"reward/mean": 1.0})


def test_log_probs_of_float32_take_four_bytes() -> None:
    def size(value: float, count: int) -> int:
        batch = make_batch(0)
        batch.groups[0].samples[0] = single_turn([1, 2], [3] * count, [value] * count, [], "stop", 1.0)
        ((_, (first, _)),) = json.loads(encode_batch(batch))["groups"]
        return len(first["branches"][0][1]["log_probs"][1])

    assert size(-0.1, 3000) == 2 * size(-0.25, 3000)  # base64 of 8 and of 4 bytes each


@pytest.mark.parametrize("data", [b"[]", b"{}", b'{"format": 99}'])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a recorded batch"):
        decode_batch(data)


def test_a_journal_writes_a_repeated_prompt_once() -> None:
    """A group's prompt may be long, and every branch of a trajectory may repeat it."""
    turn = completion_of(make_batch(0).samples[0])
    sample = Sample([Branch([Given(list(range(1000))), turn])] * 2, "stop", 1.0)
    batch = Batch(0, [Group(0, [sample] * 8)])
    assert decode_batch(encode_batch(batch)) == batch
    assert len(encode_batch(batch)) < 2 * len(encode_batch(Batch(0, [Group(0, [sample])])))


def test_groups_must_have_samples() -> None:
    with pytest.raises(ValueError, match="group 7 is empty"):
        encode_batch(Batch(0, [Group(7, [])]))


def record_run(run_dir: Path, steps: int) -> None:
    journal = Journal(run_dir)
    journal.append_decision(0, True)
    for version in range(steps):
        journal.append_batch(make_batch(version))
        journal.append_decision(version + 1, version % 2 == 0)
    journal.close()


def summary(run_dir: Path) -> list[Any]:
    return [(record["record"], record["version"]) for _, record in read_records(run_dir / JOURNAL_NAME)]


def test_a_replay_hands_out_what_was_recorded(tmp_path: Path) -> None:
    record_run(tmp_path, 4)
    source = ReplaySource(tmp_path)
    assert source.versions == [0, 1, 2, 3]
    assert [source.next_batch(version) for version in (0, 1, 3)] == [make_batch(version) for version in (0, 1, 3)]
    decisions = [record for _, record in read_records(source.path) if record["record"] == "decision"]
    assert [record["published"] for record in decisions] == [True, True, False, True, False]
    with pytest.raises(UserError, match="versions 0 to 3, but a batch for version 4"):
        source.next_batch(4)


def test_a_replay_is_recorded_itself(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    record_run(tmp_path, 2)
    journal = Journal(tmp_path / "new")
    ReplaySource(tmp_path, journal).next_batch(1)
    assert ReplaySource(tmp_path / "new").next_batch(1) == make_batch(1)
    with pytest.raises(UserError, match="this very run"):
        ReplaySource(tmp_path / "new", journal)


def test_replay_needs_a_record(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no journal.jsonl"):
        ReplaySource(tmp_path)
    (tmp_path / JOURNAL_NAME).write_text("")
    with pytest.raises(UserError, match="no batch at all"):
        ReplaySource(tmp_path).next_batch(0)


@given(st.integers(0, 400))
@settings(max_examples=40)
def test_a_kill_in_the_middle_of_a_line_costs_that_line_alone(tmp_path_factory: Any, cut: int) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    record_run(run_dir, 2)
    path = run_dir / JOURNAL_NAME
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - cut])
    whole = data[: len(data) - cut].count(b"\n")
    assert len(summary(run_dir)) == whole
    journal = Journal(run_dir)
    journal.append_decision(9, True)
    journal.close()
    assert len(summary(run_dir)) == whole + 1
    assert summary(run_dir)[-1] == ("decision", 9)


def test_damage_before_the_last_line_is_reported(tmp_path: Path) -> None:
    record_run(tmp_path, 2)
    path = tmp_path / JOURNAL_NAME
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"garbage\n", *lines[1:]]))
    with pytest.raises(UserError, match="line 2: .* Delete that line to go on without it"):
        ReplaySource(tmp_path)


@pytest.mark.parametrize("of", ["log_probs", "teacher_log_probs"])
def test_log_probs_of_other_tokens_are_refused(tmp_path: Path, of: str) -> None:
    batch, journal = make_batch(0), Journal(tmp_path)
    completion = batch.samples[0].branches[0].sampled[0]
    setattr(completion, of, [-1.0] * (len(completion.token_ids) + 1))
    journal.append_batch(batch)
    with pytest.raises(UserError, match=r"version 0 cannot be read .*\d log-probs \((sampling|teacher)\) of \d tokens"):
        ReplaySource(tmp_path).next_batch(0)


def test_no_flipped_bit_of_a_batch_is_trained_on(tmp_path: Path) -> None:
    record_run(tmp_path, 2)
    path = tmp_path / JOURNAL_NAME
    whole, bits = path.read_bytes(), random.Random(2)
    line = whole.index(b'{"record":"batch","version":1')
    for number in range(300):
        place = line + 28 if number < 8 else bits.randrange(line, whole.index(b"\n", line) + 1)  # first the version
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << bits.randrange(8))]) + whole[place + 1 :])
        try:
            source = ReplaySource(tmp_path)
            for version in source.versions:
                assert source.read_batch(version) == make_batch(version)  # base64's last bits may say nothing
        except UserError as error:
            assert JOURNAL_NAME in str(error)
    path.write_bytes(whole)
    assert ReplaySource(tmp_path).read_batch(1) == make_batch(1)


def test_batches_are_compressed(tmp_path: Path) -> None:
    batch = make_batch(0)
    batch.groups[0].samples *= 50
    journal = Journal(tmp_path)
    journal.append_batch(batch)
    journal.close()
    assert ReplaySource(tmp_path).read_batch(0) == batch
    assert 10 * (tmp_path / JOURNAL_NAME).stat().st_size < len(encode_batch(batch))


@pytest.mark.parametrize("needed", [math.inf, 15])
def test_the_oldest_batches_are_dropped_but_none_that_is_trained_on_again(tmp_path: Path, needed: float) -> None:
    line = len(json.dumps({"record": "decision", "version": 10, "published": True})) + 1
    record_run(tmp_path, 1)
    journal = Journal(tmp_path, max_bytes=(tmp_path / JOURNAL_NAME).stat().st_size * 8, needed_from=lambda: needed)
    for version in range(1, 60):
        journal.append_batch(make_batch(version))
        journal.append_decision(version + 1, True)
        assert journal.path.stat().st_size <= journal._max_bytes + 2 * line + 500 or needed == 15
        if version == 20:
            kept = ReplaySource(tmp_path).versions
            assert kept == list(range(kept[0], 21)) and 0 < kept[0] <= needed
            assert ReplaySource(tmp_path).read_batch(kept[0]) == make_batch(kept[0])
            with pytest.raises(UserError, match=r"older ones were dropped there \(rollout.journal_max_mb\)"):
                ReplaySource(tmp_path).next_batch(0)
    kept = ReplaySource(tmp_path).versions
    assert kept[-1] == 59 and (kept[0] == 15 if needed == 15 else kept[0] > 40)
    # What is left is cut and trained on again as ever.
    assert journal.set_aside(57)[1].versions == [57, 58, 59]
    assert journal.path.with_suffix(".tmp").exists() is False


@pytest.mark.parametrize("step", [0, 1, 3, 4])
def test_a_resume_forgets_what_came_after_the_checkpoint(tmp_path: Path, step: int) -> None:
    record_run(tmp_path, 4)
    journal = Journal(tmp_path)
    journal.resume_at(step)
    kept = [("decision", 0)]
    for version in range(step):
        kept += [("batch", version), ("decision", version + 1)]
    assert summary(tmp_path) == kept
    journal.append_batch(make_batch(step))
    journal.close()
    assert summary(tmp_path) == [*kept, ("batch", step)]


def test_batches_after_the_checkpoint_are_kept_over_any_number_of_restarts(tmp_path: Path) -> None:
    record_run(tmp_path, 4)
    for reached in (4, 2):  # the second time it dies earlier, with a batch more of its own
        journal = Journal(tmp_path)
        decided, kept = journal.set_aside(1)
        assert decided == reached and kept.versions == [1, 2, 3]
        journal.append_restart(1, {"reason": "rank 0 was killed by SIGKILL"})
        assert summary(tmp_path)[3 if reached == 4 else 4 :] == [("restart", 1)]
        assert kept.next_batch(1) == make_batch(1)
        journal.append_decision(2, True)
        journal.close()
    assert [kept.read_batch(version) for version in kept.versions] == [make_batch(1), make_batch(2), make_batch(3)]
    # Someone goes back by hand: what was kept until then must not be trained on after that, if ranks are lost again.
    journal = Journal(tmp_path)
    journal.resume_at(1)
    journal.append_batch(make_batch(1))
    journal.close()
    assert Journal(tmp_path).set_aside(1)[1].versions == [1]
    assert Journal(tmp_path).set_aside(4)[1].versions == []
