"""The registry's journal."""

from __future__ import annotations

import json
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from torchtitan.weight_sync import main
from torchtitan.weight_sync.sockets import SocketRuntime


def test_a_disk_that_hangs_costs_lines_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "MAXIMUM_WAITING", 4)
    runtime = SocketRuntime()
    journal = main.Journal(runtime, tmp_path / "journal.jsonl", term=1)
    works, hangs = threading.Event(), threading.Event()
    write = journal._file.write

    def slow_write(line: str) -> int:
        hangs.set()
        assert works.wait(PATIENCE_S)
        return write(line)

    monkeypatch.setattr(journal, "_file", SimpleNamespace(write=slow_write))
    thread = threading.Thread(target=runtime.run)
    thread.start()
    runtime.post(partial(journal.write, "line", {"number": 0}))
    assert hangs.wait(PATIENCE_S)
    for number in range(1, 10):
        runtime.post(partial(journal.write, "line", {"number": number}))
    until(lambda: journal._lost == 6)
    works.set()
    until(lambda: journal._waiting == 0)
    runtime.post(partial(journal.write, "line", {"number": 10}))
    runtime.stop()
    thread.join(PATIENCE_S)
    runtime.finish_work("journal", time.monotonic() + PATIENCE_S)
    records = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [record["number"] for record in records if record["event"] == "line"] == [0, 1, 2, 3, 10]
    assert [record["number"] for record in records if record.get("lost_lines") == 6] == [10]


def test_a_disk_that_hangs_again_keeps_no_more_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "MAXIMUM_WAITING", 2)
    waiting: list[Any] = []
    runtime: Any = SimpleNamespace(work=lambda _lane, _function, done: waiting.append(done))
    journal = main.Journal(runtime, tmp_path / "journal.jsonl", term=1)
    for _ in range(3):
        journal.write("line", {})
    waiting.pop(0)(None, None)
    for _ in range(5):
        journal.write("line", {})
    assert len(waiting) == 2
