"""Fault injection: what is read and refused, when a fault strikes and how often, and what it does to a process."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import faults
from tests.faults import Fault, FaultError
from tests.patience import PATIENCE_S, until
from torchtitan.weight_sync.wire import hook

ROOT = Path(__file__).parents[3]


def switch(monkeypatch: pytest.MonkeyPatch, *texts: str) -> None:
    faults.inject(monkeypatch, ";".join(texts))
    faults._plans.clear()  # each test counts for itself


def in_a_process(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", f"from tests import faults\n{program}"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(faults.VARIABLE, raising=False)
    assert faults.at("send", version=1) == frozenset()
    assert faults.bytes_per_second(version=1, actor="a", rank=0) == 0
    assert hook.at("send", version=1) == frozenset() and hook.bytes_per_second("send") == 0


def test_the_synchronisation_meets_faults_through_its_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    switch(monkeypatch, "corrupt:version=2", "throttle:bytes_per_s=700")
    assert hook.at("send", version=2) == {"corrupt"} and hook.bytes_per_second("send", version=2) == 700


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("explode:phase=send", "there is no action 'explode', only delay, drop"),
        ("kill:phase=lunch", "phase must be one of snapshot, checksum"),
        ("kill", "phase must be one of"),
        ("corrupt:phase=apply", "corrupt happens in phase write or send or relay or receive, not in apply"),
        ("kill:phase=apply,rank=0", "takes actor, name, probability, times, version, but no rank"),
        ("kill:phase=apply,version=three", "invalid literal"),
        ("kill:phase=apply,version", "is not a key=value"),
        ("kill:phase=apply,version=1,version=2", "is not a key=value that was not there before"),
        ("kill:phase=apply,probability=2", "probability must be 0 to 1"),
        ("kill:phase=apply,times=0", "times at least 1"),
        ("freeze:phase=apply,seconds=nan", "seconds 0 to"),
        ("delay:phase=apply", "delay needs seconds"),
        ("throttle:actor=a", "throttle needs bytes_per_s"),
        ("throttle:bytes_per_s=5,times=3", "but no times"),
        ("seed=x", "there is no action 'seed=x'"),
    ],
)
def test_an_unknown_fault_is_refused_with_the_known_ones(text: str, message: str) -> None:
    with pytest.raises(FaultError, match=message):
        faults.parse([text])


def test_versions_and_usual_phases() -> None:
    seed, plan = faults.parse(["seed=7", "", "corrupt:version=3", "reset:version=3-", "drop:version=3-5"])
    assert seed == 7 and [fault.phase for fault in plan] == ["send"] * 3
    struck = [[v for v in range(9) if fault.matches(("send", v, "a", 0, 0))] for fault in plan]
    assert struck == [[3], [3, 4, 5, 6, 7, 8], [3, 4, 5]]
    assert Fault.parse("full_disk:rank=1").phase == "write"
    assert not Fault.parse("corrupt:version=3,actor=b").matches(("send", 3, "a", 0, 0))
    assert not Fault.parse("corrupt:version=3").matches(("send", 3, "a", 0, 1)), "once per delivery, not per bucket"


def test_a_fault_strikes_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    switch(monkeypatch, "corrupt:version=2,times=2", "drop:phase=staged,actor=a")
    found = [faults.at("send", version=2, actor="a", rank=0, bucket=0) for _ in range(4)]
    assert found == [{"corrupt"}, {"corrupt"}, frozenset(), frozenset()]
    assert [faults.at("staged", version=v, actor="a") for v in (0, 1)] == [{"drop"}, frozenset()]


def test_actions_that_the_caller_sees_as_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    switch(monkeypatch, "reset:actor=b", "full_disk:times=1", "throttle:bytes_per_s=700,actor=b")
    with pytest.raises(ConnectionResetError, match="fault injection: reset:actor=b"):
        faults.at("send", version=0, actor="b", rank=0, bucket=0)
    with pytest.raises(OSError) as raised:
        faults.at("write", version=0, rank=0, bucket=0)
    assert raised.value.errno == errno.ENOSPC
    assert [faults.bytes_per_second(version=9, actor=name, rank=0) for name in "abb"] == [0, 700, 700]


def test_probability_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(seed: int) -> list[bool]:
        switch(monkeypatch, f"seed={seed}", "drop:probability=0.3")
        return [bool(faults.at("send", version=v, actor="a", rank=0, bucket=0)) for v in range(400)]

    first = run(1)
    assert first == run(1) and first != run(2)
    assert 80 < sum(first) < 160


def test_a_file_is_counted_over_all_processes_and_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tmp_path / "sync" / "faults.txt"
    monkeypatch.setenv(faults.VARIABLE, f"@{plan}")
    faults._plans.clear()
    assert faults.at("apply", version=4, actor="a") == frozenset(), "no file yet, no faults"
    faults.write_plan(["seed=3", "kill:phase=apply,version=4"], plan)
    killed = in_a_process("faults.at('apply', version=4, actor='a')")
    assert killed.wait(PATIENCE_S) == -signal.SIGKILL
    assert "FAULT INJECTION IS ON" in killed.communicate()[1]
    # Started again it meets the same version, and so does this process, which has read the file since.
    assert in_a_process("faults.at('apply', version=4, actor='a')").wait(PATIENCE_S) == 0
    faults.at("apply", version=4, actor="a")
    (strike,) = (tmp_path / "sync" / "faults.txt.struck").iterdir()
    record = json.loads(strike.read_text())
    assert record["pid"] == killed.pid and record["where"] == ["apply", 4, "a", None, None]
    plan.write_text("drop:phase=applied\n")
    assert faults.at("applied", version=4, actor="a") == {"drop"}
    plan.unlink()
    assert faults.at("applied", version=5, actor="a") == frozenset()


def test_freeze_ends_by_itself_and_leaves_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    switch(monkeypatch, "freeze:phase=publish,seconds=0.5")
    process = in_a_process("faults.at('publish', version=0)\nimport psutil\nprint(psutil.Process().children())")
    until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, process=process)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 and output == "[]\n"


def test_damage_is_one_bit() -> None:
    data = os.urandom(1001)
    changed = bytes(faults.damaged(memoryview(data)))
    assert sum((a ^ b).bit_count() for a, b in zip(data, changed, strict=True)) == 1
