"""After an update: does the engine compute with what the trainer sent? What all ways to look at it have in common."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchtitan.inference.base_weights import is_adapter_version
from torchtitan.weight_sync.digest import Stopped, Unverifiable
from torchtitan.weight_sync.staging import StagedVersion

logger = logging.getLogger(__name__)

# So many torn versions in a row are the fault of this process, or of its memory.
MOST_TORN = 3
Torn = Callable[[str, int, str, int], None]
"""torn(epoch, version, reason, how often in a row)"""


@dataclass
class Verified:
    """What /health and /metrics show."""

    version: int | None = None
    """The last one that was found whole"""
    whole: int = 0
    torn: int = 0
    unfinished: int = 0
    """Given up because the next version was there"""
    seconds: float = 0.0
    unverifiable: str = ""
    """Why nothing can be told; empty where something can"""
    torn_in_a_row: int = field(default=0, repr=False)

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "torn_in_a_row"}


class Verification:
    """every: versions from one look to the next, 0 for none.

    torn: called where a version is not what was sent, and where it could not be looked at, which is no proof of
    anything good.
    """

    def __init__(self, every: int, torn: Torn):
        self.every, self.status = every, Verified()
        self._torn = torn
        self._applied = 0

    @property
    def verifies(self) -> bool:
        """Whether versions are looked at, as far as is known."""
        return self.every > 0 and not self.status.unverifiable

    def due(self, staged: StagedVersion) -> bool:
        """Whether to look at this version, which the engine has just taken."""
        due = self.every > 0 and (self._applied % self.every == 0 or self.status.torn_in_a_row > 0)
        self._applied += 1
        # Adapters are not what the weights are: applying them looks for itself.
        return due and staged.proof is not None and not is_adapter_version(staged.tensors)

    def judge(self, staged: StagedVersion, look: Callable[[], str | None]) -> bool:
        """Have look() do a piece of the work: it returns what is wrong with this version, nothing where all has been
        found as it was sent, and None where there is more to do. Returns whether it is over."""
        begun, status = time.monotonic(), self.status
        try:
            wrong = look()
        except Stopped:
            status.unfinished += 1
            logger.warning("version %d was replaced before its weights had been verified", staged.version)
            return True
        except Unverifiable as error:
            status.unverifiable = str(error)
            logger.warning("weights cannot be verified here: %s", error)
            return True
        except Exception as error:
            logger.exception("verifying version %d failed", staged.version)
            wrong = f"its weights could not be looked at: {error!r}"
        finally:
            status.seconds += time.monotonic() - begun
        if wrong is None:
            return False
        if wrong:
            status.torn += 1
            status.torn_in_a_row += 1
            text = f"the engine does not hold version {staged.version} as it was sent: {wrong}"
            logger.error("%s", text)
            self._torn(staged.epoch, staged.version, text, status.torn_in_a_row)
        else:
            status.version, status.torn_in_a_row = staged.version, 0
            status.whole += 1
        return True
