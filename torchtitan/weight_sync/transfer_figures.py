"""What the transfer of one version to one worker, or to all of an actor's, took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.weight_sync.wire import Message, ProtocolError

_SUMMED = ("verify_s", "bytes_full", "bytes_delta", "bytes_relayed", "bytes_resulting")
_TIMES = ("transfer_begin", "transfer_end")


@dataclass
class TransferFigures:
    """What one attempt's transfer took. Times of time.time(), seconds, payload bytes."""

    begin: float = 0.0
    end: float = 0.0
    received_bytes: int = 0
    """As they came over the wire, or were fetched"""
    verify_s: float = 0.0
    """Summed over buckets; most of it while others arrived"""
    bytes_full: int = 0
    bytes_delta: int = 0
    bytes_relayed: int = 0
    bytes_resulting: int = 0
    """Of the buckets that arrived, however they were encoded"""

    def to_json(self) -> Message:
        """Part of what `applied` says."""
        return _with_rates(
            {
                "verify_s": self.verify_s,
                "bytes_full": self.bytes_full,
                "bytes_delta": self.bytes_delta,
                "bytes_relayed": self.bytes_relayed,
                "bytes_resulting": self.bytes_resulting,
                "transfer_begin": self.begin,
                "transfer_end": self.end,
            }
        )


def check_figures(figures: Any) -> Message:
    """A worker's figures, as they came. Raises ProtocolError for what together() could not put together."""
    if not isinstance(figures, dict) or any(type(figures.get(name)) not in (int, float) for name in _SUMMED + _TIMES):
        raise ProtocolError("a worker's figures lack numbers")
    return figures


def together(figures: list[Message]) -> Message:
    """Figures of an actor from those of its workers, which transfer at the same time."""
    total: Message = {name: sum(one[name] for one in figures) for name in _SUMMED}
    total["transfer_begin"] = min(one["transfer_begin"] for one in figures)
    total["transfer_end"] = max(one["transfer_end"] for one in figures)
    return _with_rates(total)


def _with_rates(figures: Message) -> Message:
    seconds = figures["transfer_end"] - figures["transfer_begin"]
    rate = figures["bytes_resulting"] / max(seconds, 1e-9) / 1e9
    return {**figures, "transfer_s": seconds, "gigabytes_per_s": rate}
