"""The engine's turn: a verified version is handed to it on a thread of its own, and what comes of it is reported."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.weight_sync import faults
from torchtitan.weight_sync.staging import StagedVersion, WeightsRefused

logger = logging.getLogger(__name__)

ApplyFunction = Callable[[StagedVersion], "float | Mapping[str, float] | None"]


@dataclass(frozen=True)
class ApplyResult:
    """error: why the version is not served, None where it is; refused: the engine is as it was before."""

    error: str | None
    refused: bool
    figures: dict[str, Any]


def apply_on_thread(
    actor: str,
    version: int,
    make: Callable[[], StagedVersion],
    apply: ApplyFunction,
    check: Callable[[], None],
    report: Callable[[ApplyResult], None],
) -> threading.Thread:
    """Calls apply(make()), then check(), which raises where the version is not whole in the engine after all."""

    def work() -> None:
        begun, begun_at = time.monotonic(), time.time()
        error: str | None = None
        refused = False
        cost: dict[str, float] = {}
        try:
            faults.at("apply", version=version, actor=actor)
            cost = _in_seconds(apply(make()))
            check()
        except WeightsRefused as failure:
            logger.error("%s: version %d refused: %s", actor, version, failure)
            error, refused = str(failure), True
        except BaseException as failure:
            # Half a version may be in the engine now: never served, and said so to everybody. Whatever was raised: the
            # receiver waits for this thread's word.
            logger.exception("%s: applying version %d failed", actor, version)
            error = repr(failure)
        elapsed = time.monotonic() - begun
        figures = {"apply_s": elapsed, "apply_begin": begun_at, "apply_end": begun_at + elapsed, "pause_s": elapsed}
        report(ApplyResult(error, refused, {**figures, **cost}))

    thread = threading.Thread(target=work, name=f"weight-apply-{actor}", daemon=True)
    thread.start()
    return thread


def _in_seconds(cost: float | Mapping[str, float] | None) -> dict[str, float]:
    """What an engine returned, as figures by name that can be sent."""
    if cost is None:
        return {}
    named = cost if isinstance(cost, Mapping) else {"pause_s": cost}
    return {str(name): float(value) for name, value in named.items()}
