"""Parsers of tool calls as users write them; a process loads them, so this file imports little."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any


def bracketed(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Reads `[look here]`. Some texts show what a parser can do to the process that it runs in."""
    if "[oops" in text:
        raise ValueError("a call must be [name where]")
    if "[forever" in text:
        re.fullmatch(r"(a+)+b", "a" * 60)
    if "[until" in text:
        while not Path(text.partition("[until ")[2].rstrip("]")).exists():
            time.sleep(0.01)
    if "[exit" in text:
        os._exit(3)
    if "[object" in text:
        return [("look", {"at": object()})]
    return [(name, {"at": where}) for name, where in re.findall(r"\[(\w+) (\w+)\]", text)]
