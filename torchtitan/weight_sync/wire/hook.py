"""Where a module from outside of this package takes part in the synchronisation, at named phases: fault injection.

TORCHTITAN_WEIGHT_SYNC_HOOK names the module (`tests.faults`). Without it, every function here does nothing.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

VARIABLE = "TORCHTITAN_WEIGHT_SYNC_HOOK"


def module() -> Any:
    """Return the module, imported; None without one. The variable may change while a process runs."""
    name = os.environ.get(VARIABLE)
    return importlib.import_module(name) if name else None


def at(phase: str, **where: Any) -> frozenset[str]:
    """Every process of the synchronisation calls this at each phase. Returns what the caller must do itself: "drop" and
    "corrupt". The module may block, end the process or raise OSError."""
    hook = module()
    return frozenset() if hook is None else hook.at(phase, **where)


def bytes_per_second(phase: str, **where: Any) -> int:
    """Return the rate of a throttled connection; 0: unlimited."""
    hook = module()
    return 0 if hook is None else hook.bytes_per_second(phase, **where)


def damaged(data: memoryview) -> memoryview:
    """Return what is sent or written in place of `data` where at() has asked for "corrupt"."""
    return memoryview(module().damaged(data))
