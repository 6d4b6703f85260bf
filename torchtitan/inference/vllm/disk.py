"""A version into vLLM by files, for engines without our backend: its workers read them like a checkpoint."""

from __future__ import annotations

from pathlib import Path

from torchtitan.inference.agent.disk import DiskHandOver
from torchtitan.inference.agent.engine import EngineOptions
from torchtitan.inference.vllm.control import VLLMControl


class VLLMDiskHandOver(DiskHandOver):
    """ours: the engine was started with our worker extension, which repacks tied heads. One that runs already and has
    it not may go on computing with the old head where that is packed, as on CPUs."""

    def __init__(self, control: VLLMControl, options: EngineOptions, ours: bool):
        super().__init__(options)
        self._control, self._ours = control, ours

    def read_files(self, folder: Path, label: str) -> None:
        self._call_workers("reload_weights", {"weights_path": str(folder)})
        if self._ours:
            self._call_workers("torchtitan_repack_tied_heads", {})
        self._control.order("/update_weight_version", {"new_version": label})

    def _call_workers(self, method: str, arguments: dict[str, str]) -> None:
        timeout_s = self._control.timeout_s
        self._control.order("/collective_rpc", {"method": method, "kwargs": arguments, "timeout": timeout_s})
