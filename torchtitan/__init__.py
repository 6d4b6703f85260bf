"""GRPO post-training of language models in the style of torchtitan, with asynchronous weight sync."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan.api import Source as Source
    from torchtitan.api import train as train

__version__ = "0.1.0"
# Keys that a process of ours gets from the one that started it: this is the descriptor they are read from, since /proc
# would show to others what is in the environment (utils/child_process.py).
if _keys := os.environ.pop("TORCHTITAN_KEYS", ""):
    with open(int(_keys), encoding="utf-8") as _file:
        os.environ.update(json.load(_file))

# By this, programs tell this package from PyPI's (errors.py).
DISTRIBUTION = "torchtitan-grpo"

# PyPI's torchtitan is another package with the same import name; in one environment their files get mixed up. This
# looks for its metadata by itself: importlib.metadata would slow down the start of every process.
for _other in (found for folder in sys.path for found in Path(folder or ".").glob("torchtitan-*.dist-info")):
    raise ImportError(
        f"torchtitan-grpo cannot run beside another package that is imported as torchtitan ({_other}): "
        "pip uninstall torchtitan and install torchtitan-grpo anew, or give it an environment of its own"
    )


def __getattr__(name: str) -> Any:
    """`from torchtitan import train`; the engines' processes import this package too, and need nothing of that."""
    if name in ("train", "Source"):
        from importlib import import_module

        return getattr(import_module("torchtitan.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
