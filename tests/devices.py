"""The devices on which numbers are compared: here always, on a GPU where there is one (`pytest -m gpu`)."""

from __future__ import annotations

import pytest
import torch

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch sees none"),
]
on_devices = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=needs_gpu)])
"""Gives a test the argument `where`"""

ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""The share of a result's norm by which it may differ from the same in float64, for operands that have been rounded to
the type: a few of its last bits"""


def assert_near(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    """`exact` is the same in float64 on the CPU."""
    assert found.shape == exact.shape
    difference = (found.detach().double().cpu() - exact.detach()).norm()
    assert difference <= ROUNDING[dtype] * exact.norm(), f"{difference / exact.norm():.2e}"
    # Roundings average out over the elements, and a wrong factor does not.
    factor = (found.detach().double().cpu() * exact.detach()).sum() / exact.detach().square().sum()
    allowed = ROUNDING[dtype] * max(2 / exact.numel() ** 0.5, 0.02)
    assert abs(factor - 1) <= allowed, f"factor {factor:.6f}"
