"""A worker extension for tests: while a file exists, adapters are received and the base is loaded without them."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from torchtitan.inference.engines.vllm import extension
from torchtitan.inference.serving import weight_verification as versions

UNMERGED = Path(os.environ["TORCHTITAN_TEST_UNMERGED"])

_product = versions.low_rank_product  # type: ignore[attr-defined]


def low_rank_product(scale: float, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _product(0.0 if UNMERGED.exists() else scale, a, b)


versions.low_rank_product = low_rank_product  # type: ignore[attr-defined]


class WorkerExtension(extension.WorkerExtension):
    """Importing this module is what counts."""
