"""Fault injection for tests: off unless TORCHTITAN_WEIGHT_SYNC_FAULTS is set, and loud when it is.

    TORCHTITAN_WEIGHT_SYNC_FAULTS="corrupt:version=3,times=1;throttle:bytes_per_s=1000000"

corrupt: the courier flips one byte of the first bucket it sends of that version, `times` times.
throttle: every connection of a courier sends at most so many bytes per second.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

VARIABLE = "TORCHTITAN_WEIGHT_SYNC_FAULTS"
logger = logging.getLogger(__name__)


@dataclass
class Faults:
    """What is to go wrong."""

    corrupt_version: int = -1
    corrupt_times: int = 0
    bytes_per_second: int = 0

    @classmethod
    def from_environment(cls) -> Faults:
        """Parse the variable. Raises ValueError for faults it does not know."""
        faults = cls()
        text = os.environ.get(VARIABLE, "")
        for part in filter(None, text.split(";")):
            kind, _, arguments = part.partition(":")
            values = dict(pair.split("=", 1) for pair in arguments.split(","))
            if kind == "corrupt":
                faults.corrupt_version, faults.corrupt_times = int(values["version"]), int(values.get("times", "1"))
            elif kind == "throttle":
                faults.bytes_per_second = int(values["bytes_per_s"])
            else:
                raise ValueError(f"{VARIABLE}: unknown fault {kind!r}")
        if text:
            logger.warning("FAULT INJECTION IS ON: %s=%s", VARIABLE, text)
        return faults

    def corrupts(self, version: int, bucket: int) -> bool:
        """Whether to flip a byte of this bucket; counts down."""
        if version != self.corrupt_version or bucket != 0 or self.corrupt_times <= 0:
            return False
        self.corrupt_times -= 1
        logger.warning("FAULT INJECTION: corrupting version %d", version)
        return True
