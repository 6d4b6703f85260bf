"""The bodies of /sleep and /wake, which every actor's server understands. No torch here."""

from __future__ import annotations

from typing import Any

from torchtitan.inference.types import TAGS, Tag


def parse_sleep(data: dict[str, Any]) -> tuple[int, float]:
    """{"level", "finish_s"} -> level, and seconds for what runs to finish. Raises ValueError."""
    level, finish_s = data.get("level", 1), data.get("finish_s", 0.0)
    if type(level) is not int or level not in (1, 2):
        raise ValueError(f"level must be 1 or 2, got {level!r}")
    if type(finish_s) not in (int, float) or not 0 <= finish_s < float("inf"):
        raise ValueError(f"finish_s must be a finite number of at least 0, got {finish_s!r}")
    return level, float(finish_s)


def parse_wake(data: dict[str, Any]) -> list[Tag]:
    """{"tags"} -> the parts of its memory that an engine is to take again, or all. Raises ValueError."""
    tags = data.get("tags", list(TAGS))
    if not isinstance(tags, list) or not all(tag in TAGS for tag in tags):
        raise ValueError(f"tags must be a list of {' and '.join(TAGS)}, got {tags!r}")
    return tags
