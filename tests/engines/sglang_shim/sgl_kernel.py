"""Stands in for SGLang's kernels, which are built for GPUs and some CPUs only (see sitecustomize.py)."""

from __future__ import annotations

from typing import Any

import torch

__version__ = "0.0.0"


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    _pool_len: int,
) -> None:
    """Consecutive pieces of out_cache_loc go to req_to_token[row, start:end]."""
    at = 0
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:last] = out_cache_loc[at : at + last - first].to(req_to_token.dtype)
        at += last - first


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_arguments: Any, **_named: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is not there: this is the stand-in for tests")

    return missing
