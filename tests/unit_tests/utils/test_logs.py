"""Text of others in logs: an escape sequence or a line break in a completion or a name forges no line."""

from __future__ import annotations

import io
import logging
import time

import pytest

from torchtitan.utils import logs
from torchtitan.utils.logs import RateLimit, SafeFormatter, escaped

HOSTILE = "ok\n12:00:00 I torchtitan: all is well\x1b[1A\x1b[2K\r\x9b31m\u202e\x00"


def logged(*arguments: object, error: Exception | None = None) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(SafeFormatter("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S"))
    logger = logging.Logger("of this test")
    logger.addHandler(handler)
    logger.warning(*arguments, exc_info=error)
    return stream.getvalue()


def test_text_of_others_neither_begins_a_line_nor_moves_the_cursor() -> None:
    text = logged("the reward said %s", HOSTILE)
    assert not any(char in text for char in "\x1b\r\x9b\u202e\x00")
    first, second = text.removesuffix("\n").split("\n")
    assert first.endswith("the reward said ok") and second.startswith("  12:00:00") and "\\x1b[1A\\x1b[2K" in second
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        text = logged("it failed", error=error)
    assert "\x1b" not in text and all(line.startswith("  ") for line in text.splitlines()[1:])


def test_our_own_lines_stay_as_they_are() -> None:
    assert logged("eval … pass@1 ↑ %.3f\tdone", 0.5).endswith(" W eval … pass@1 ↑ 0.500\tdone\n")


def test_escaped_is_one_line_of_bounded_length() -> None:
    assert escaped("plain text") == "plain text" and escaped("a\n\x1bb") == "a\\n\\x1bb"
    assert escaped("x" * 9000, 10) == "x" * 10 + "… (9000 characters)"
    assert len(escaped("\x01" * 9000)) < 4 * logs.LONGEST + 30


def test_lines_that_strangers_cause_are_bounded_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    limit, passed = RateLimit(3, 10.0), list[str]()

    def say() -> None:
        record = logging.LogRecord("n", logging.WARNING, "f", 1, "closing %s", ("it",), None)
        if limit.filter(record):
            passed.append(record.getMessage())

    for _ in range(1000):
        say()
    assert passed == ["closing it"] * 3
    now[0] += 11.0
    say()
    assert passed[3] == "closing it (997 lines like this were left out)"
