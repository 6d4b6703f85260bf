"""What all built-in reward functions share: the text of a completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Completion = str | list[dict[str, Any]]
"""Text, or chat messages where the prompt was a chat"""


def texts(completions: Sequence[Completion], prefill: str = "") -> list[str]:
    """The text of every completion, behind what the prompt began it with; of a chat, the last message's content."""
    return [prefill + (one if isinstance(one, str) else one[-1]["content"]) for one in completions]
