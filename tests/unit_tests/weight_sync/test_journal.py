"""The registry's journal."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.patience import PATIENCE_S, until
from torchtitan.weight_sync.main import Journal


def test_a_disk_that_hangs_costs_lines_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "journal.jsonl", term=1, maximum_waiting=3)
    works, hangs = threading.Event(), threading.Event()
    write = journal._file.write

    def slow_write(line: str) -> int:
        hangs.set()
        assert works.wait(PATIENCE_S)
        return write(line)

    monkeypatch.setattr(journal, "_file", SimpleNamespace(write=slow_write, close=journal._file.close))
    journal.write("line", {"number": 0})
    assert hangs.wait(PATIENCE_S)
    for number in range(1, 10):
        journal.write("line", {"number": number})
    works.set()
    until(journal._lines.empty)
    journal.write("line", {"number": 10})
    journal.close(20)
    records = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [record["number"] for record in records if record["event"] == "line"] == [0, 1, 2, 3, 10]
    assert [record["count"] for record in records if record["event"] == "lost_lines"] == [6]
