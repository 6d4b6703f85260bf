"""vLLM's workers import this (--worker-extension-cls): their next load of weights is spoiled as saboteur.py says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group

from benchmarks.weight_sync.saboteur import NO_LOAD, asked, spoiled
from torchtitan.inference.engines.vllm import backend, extension, loading

_load_weights, _repack = loading.load_weights, loading.repack_tied_heads


def load_weights(model: torch.nn.Module, config: Any, weights: Mapping[str, torch.Tensor], notes: Any) -> None:
    rank = get_tp_group().rank_in_group
    kind = asked(rank)
    if kind in NO_LOAD and not (kind == "one_of_two" and rank == 0):
        return
    loading.repack_tied_heads = (lambda _model: None) if kind == "tied_head" else _repack
    _load_weights(model, config, spoiled(kind, weights.items()) if kind not in ("", "tied_head") else weights, notes)


backend.load_weights = load_weights  # type: ignore[attr-defined]


class WorkerExtension(extension.WorkerExtension):
    """Importing this module is what counts."""
