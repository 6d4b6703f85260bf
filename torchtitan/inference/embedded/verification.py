"""After every update: does the engine hold, in the tensors that it computes with, what the trainer sent?

Runs on a thread of its own while the engine generates again, so a pause is as long as without it; the next update waits
until it is done, so it never sees half of one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torchtitan.distributed.device import finish_compute
from torchtitan.inference.adapter_version import is_adapter_version
from torchtitan.weight_sync.digest import Stopped, Unverifiable, differing_parameters
from torchtitan.weight_sync.staging import StagedVersion

logger = logging.getLogger(__name__)

# An update waits for so long. What is not looked at by then is not looked at: the next version will be.
FINISH_SECONDS = 4.0
# So many torn versions in a row are the fault of this process, or of its memory.
MOST_TORN = 3


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


class Verifier:
    """every: versions from one look to the next, 0 for none. live: name -> tensor in use. torn(epoch, version, reason):
    called on the verifier's thread where a version is not what was sent, and how often in a row that has been.

    `applied` and `finish` are called by one thread at a time.
    """

    def __init__(self, every: int, live: Mapping[str, torch.Tensor], torn: Callable[[str, int, str, int], None]):
        self.every, self.status = every, Verified()
        self._live, self._torn = live, torn
        self._applied = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def verifies(self) -> bool:
        """Whether versions are looked at, as far as is known."""
        return self.every > 0 and not self.status.unverifiable

    def applied(self, staged: StagedVersion) -> None:
        """The engine has taken this version. Returns at once."""
        due = self.every > 0 and self._applied % self.every == 0
        self._applied += 1
        # Adapters are not what the weights are: applying them looks for itself, see weights.py.
        if not due or staged.proof is None or is_adapter_version(staged.tensors):
            return
        self._stop.clear()
        self._thread = threading.Thread(target=self._look, args=(staged,), name="weight-verification", daemon=True)
        self._thread.start()

    def finish(self, seconds: float = FINISH_SECONDS) -> None:
        """Before weights change: wait for the look that is under way, then end it."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join(seconds)
        self._stop.set()
        # It looks for the sign between two buckets, and waits for nothing but the engine's next step.
        thread.join()

    def _look(self, staged: StagedVersion) -> None:
        assert staged.proof is not None
        begun = time.monotonic()
        reason = ""
        try:
            finish_compute(next(iter(self._live.values())).device)
            reason = differing_parameters(staged.proof, self._live, staged.tensors, self._stop.is_set)
        except Stopped:
            self.status.unfinished += 1
            logger.warning("version %d was replaced before its weights had been verified", staged.version)
            return
        except Unverifiable as error:
            self.status.unverifiable = str(error)
            logger.warning("weights cannot be verified here: %s", error)
            return
        except Exception as error:
            # Not being able to look is no proof of anything good.
            logger.exception("verifying version %d failed", staged.version)
            reason = f"they could not be read: {error!r}"
        finally:
            self.status.seconds += time.monotonic() - begun
        if not reason:
            self.status.version, self.status.torn_in_a_row = staged.version, 0
            self.status.whole += 1
            return
        self.status.torn += 1
        self.status.torn_in_a_row += 1
        text = f"the engine does not hold version {staged.version} as it was sent: {reason}"
        logger.error("%s", text)
        self._torn(staged.epoch, staged.version, text, self.status.torn_in_a_row)
