"""An environment whose worker is killed, for good, once a file is there."""

from __future__ import annotations

import os
from pathlib import Path


class Fragile:
    """One turn; the reward is 1 for an answer of even length. The rows' column `fatal` names the file."""

    def reset(self, fatal: str) -> str:
        if Path(fatal).exists():
            os._exit(1)
        return ""

    def step(self, action: str) -> tuple[str, float, bool]:
        return "", float(len(action) % 2 == 0), True
