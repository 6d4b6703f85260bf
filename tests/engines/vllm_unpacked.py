"""A worker extension for tests: while a file exists, experts stay as vLLM's reload leaves them."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from torchtitan.inference.engines.vllm import extension, loading

UNPACKED = Path(os.environ["TORCHTITAN_TEST_UNPACKED"])

_repack_experts = loading.repack_experts


def repack_experts(model: nn.Module) -> None:
    if not UNPACKED.exists():
        _repack_experts(model)


loading.repack_experts = repack_experts


class WorkerExtension(extension.WorkerExtension):
    """Importing this module is what counts."""
