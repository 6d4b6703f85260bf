"""Files of JSON lines: rows go in whole, whatever a kill or a full disk has left behind."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from torchtitan.utils import json_lines
from torchtitan.utils.json_lines import JsonLines, JsonTail, line_start, older_file, read_json_lines, read_lines


@pytest.mark.parametrize("block", [4, 65536])
@pytest.mark.parametrize("whole", [[], [{"a": 1}], [{"a": 1}, {"b": "long" * 10}]])
@pytest.mark.parametrize("torn", ["", "{", '{"a": "what a kill has left'])
def test_a_row_follows_the_last_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, whole: list[dict[str, object]], torn: str
) -> None:
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", block)
    path = tmp_path / "new" / "rows.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(row) + "\n" for row in whole) + torn)
    with JsonLines(path) as file:
        file.write({"c": 2})
        assert read_json_lines(path) == [*whole, {"c": 2}], "it must be there before the file is closed"
    assert path.read_text().endswith('{"c": 2}\n')


def test_a_row_that_fails_half_way_spoils_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = JsonLines(tmp_path / "rows.jsonl", durable=True, separators=(",", ":"))
    file.write({"a": 1})

    def no_space(_descriptor: int) -> None:
        os.truncate(file.path, file.path.stat().st_size - 3)
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        with pytest.raises(OSError, match="no space"):
            file.write({"b": 2})
    file.write({"c": 3})
    file.close()
    file.close()
    assert file.path.read_text() == '{"a":1}\n{"c":3}\n'


def test_half_a_character_costs_no_row(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "rows.jsonl", ensure_ascii=False) as file:
        file.write({"half": "a\ud83db", "whole": "é"})
    assert read_json_lines(file.path) == [{"half": "a?b", "whole": "é"}]


def test_tails_of_a_file_take_long_lines_and_torn_ends(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("short\n" + "x" * 100 + "\nlast\ntorn")
    assert read_lines(path, 0, 8) == (["short"], 6)
    assert read_lines(path, 6, 8) == (["x" * 100], 107)
    assert read_lines(path, 107, 800) == (["last"], 112) and read_lines(path, 112) == ([], 112)
    assert [line_start(path, place) for place in (-5, 0, 1, 6, 7, 107)] == [0, 0, 6, 6, 107, 107]


@pytest.mark.parametrize("moment", ["look", "open"])
def test_a_tail_meets_its_file_between_being_renamed_and_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"row": 1}\n')
    tail = JsonTail(path)
    assert [row["row"] for row in tail.read()] == [1]
    with path.open("a") as file:
        file.write('{"row": 2}\n')
    if moment == "look":
        path.replace(older_file(path))
    else:
        read = json_lines.read_lines

        def rename_and_read(found: Path, place: int) -> tuple[list[str], int]:
            monkeypatch.undo()
            path.replace(older_file(path))
            return read(found, place)

        monkeypatch.setattr(json_lines, "read_lines", rename_and_read)
    rows = [row["row"] for row in tail.read()]
    assert [row["row"] for row in JsonTail(path, last_bytes=5).read()] == [1, 2]
    path.write_text('{"row": 3}\n')
    assert rows + [row["row"] for row in tail.read()] == [2, 3]
