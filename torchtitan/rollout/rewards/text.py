"""What all built-in reward functions share: the text of a completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Completion = str | list[dict[str, Any]]
"""Text, or chat messages where the prompt was a chat"""


def texts(completions: Sequence[Completion]) -> list[str]:
    """The text of every completion; of a chat, the last message's content."""
    return [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
