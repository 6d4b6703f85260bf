"""A version into SGLang by /update_weights_from_disk."""

from __future__ import annotations

from pathlib import Path

from torchtitan.inference.agent.disk import DiskHandOver
from torchtitan.inference.agent.engine import EngineOptions
from torchtitan.inference.sglang.control import SGLangControl


class SGLangDiskHandOver(DiskHandOver):
    """Any failure may leave half a version: what SGLang calls rolling back reads the new files again."""

    def __init__(self, control: SGLangControl, options: EngineOptions):
        super().__init__(options)
        self._control = control

    def read_files(self, folder: Path, label: str) -> None:
        # A flush that finds requests running ends SGLang's scheduler: the cache is reset by an order of its own.
        body = {"model_path": str(folder), "load_format": "safetensors", "weight_version": label, "flush_cache": False}
        self._control.order("/update_weights_from_disk", body, self._control.timeout_s)
        # Only the first worker answers. Another that finds the files gone keeps its old weights, and nobody is told.
        self._control.wait_for_workers()
