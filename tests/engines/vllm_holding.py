"""A worker extension for tests: a load of weights stands still in its middle while a file exists."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from torchtitan.inference.engines.vllm import backend, extension
from torchtitan.weight_sync.memory.staging import to_copy

HOLD = Path(os.environ["TORCHTITAN_TEST_HOLD"])
BEGUN = HOLD.with_suffix(".begun")
TENSORS_BEFORE = 10

_load_weights = backend.load_weights  # type: ignore[attr-defined]


def load_weights(model: torch.nn.Module, config: object, weights: Mapping[str, torch.Tensor], *_: object) -> None:
    def held() -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(to_copy(weights)):
            if number == TENSORS_BEFORE and HOLD.exists():
                BEGUN.touch()
                while HOLD.exists():
                    time.sleep(0.02)
                BEGUN.unlink()
            yield item

    _load_weights(model, config, held())  # type: ignore[arg-type]


backend.load_weights = load_weights  # type: ignore[attr-defined]


class WorkerExtension(extension.WorkerExtension):
    """Importing this module is what counts."""
