"""vLLM's own weight transfer on CPUs, for tests: its backend `nccl`, but for the communicator, which is gloo's.

Registered by importing it in vLLM's workers (--worker-extension-cls). A load stands still in its middle while the file
HOLD exists, and fails there once where FAIL exists.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

from torchtitan.inference.vllm.broadcast import GROUP
from torchtitan.inference.vllm.extension import WorkerExtension
from torchtitan.inference.vllm.loading import repack_tied_heads

__all__ = ["WorkerExtension"]

BACKEND = "gloo_in_place_of_nccl"
SECONDS = timedelta(seconds=60)
HOLD, FAIL = (Path(os.environ["TORCHTITAN_TEST_FOLDER"]) / name for name in ("hold", "fail"))
BEGUN = HOLD.with_suffix(".begun")
# In the middle of a layer: queries and keys are there, values are not.
TENSORS_BEFORE = 3


class GlooEngine(NCCLWeightTransferEngine):
    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        self.packed, self.packed_buffer_size_bytes = init_info.packed, init_info.packed_buffer_size_bytes
        assert init_info.master_address is not None and init_info.master_port is not None
        store = dist.TCPStore(init_info.master_address, init_info.master_port, init_info.world_size, False, SECONDS)
        keys = PrefixStore("cpu/", PrefixStore(f"{GROUP}/", PrefixStore(GROUP, store)))
        rank = init_info.rank_offset + self.parallel_config.rank
        self.group: Any = dist.ProcessGroupGloo(keys, rank, init_info.world_size, SECONDS)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """As vLLM's, which needs CUDA streams; one tensor is loaded after the other."""
        assert self.packed
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        waiting: list[tuple[str, list[int], torch.dtype, int]] = []
        loaded, last = 0, len(update_info.names) - 1
        for number, (name, dtype_name, shape) in enumerate(
            zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        ):
            dtype = getattr(torch, dtype_name)
            waiting.append((name, shape, dtype, prod(shape) * dtype.itemsize))
            size = sum(one[3] for one in waiting)
            if size <= self.packed_buffer_size_bytes and number < last:
                continue
            packed = torch.empty(size, dtype=torch.uint8)
            self.group.broadcast([packed], options).wait(SECONDS)
            names, shapes, dtypes, sizes = map(list, zip(*waiting, strict=True))
            for item in unpack_tensor(packed, names, shapes, dtypes, sizes):
                self.model.load_weights([item])
                loaded += 1
                if loaded == TENSORS_BEFORE:
                    self._in_the_middle()
            waiting = []

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        repack_tied_heads(self.model)

    def shutdown(self) -> None:
        group, self.group = getattr(self, "group", None), None
        if group is not None:
            group.abort()

    def _in_the_middle(self) -> None:
        if HOLD.exists():
            BEGUN.touch()
            while HOLD.exists():
                time.sleep(0.02)
            BEGUN.unlink()
        if FAIL.exists():
            FAIL.unlink()
            raise RuntimeError("half of it")


WeightTransferEngineFactory.register_engine(BACKEND, GlooEngine)
