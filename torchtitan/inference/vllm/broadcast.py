"""A version into vLLM by its own weight group: whole tensors, packed into large pieces.

The server has vLLM's backend `nccl` and nothing of ours.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchtitan.errors import UserError
from torchtitan.inference.agent.broadcast import BroadcastLoader, Group, Tensors, WeightGroup, described, in_one_piece
from torchtitan.inference.agent.control import EngineError
from torchtitan.inference.agent.engine import EngineOptions
from torchtitan.inference.base_weights import outlines
from torchtitan.inference.vllm.control import VLLMControl
from torchtitan.utils.machine import has_gpu

# Every group has a store of its own.
GROUP = "weights"
# vLLM holds as many buffers of this size beside its weights.
BUFFER_BYTES, BUFFERS = 128 * 2**20, 2
PACKING = {"packed": True, "packed_buffer_size_bytes": BUFFER_BYTES, "packed_num_buffers": BUFFERS}
# Since then the group is told once how its bytes are packed; before, every update was.
PACKED_BY_GROUP = (0, 24)
# Since then an update has a beginning and an end.
FOUR_PHASES = (0, 22)


class VLLMBroadcastLoader(BroadcastLoader):
    """Raises UserError where the server's version is too old."""

    update_route = "/update_weights"

    def __init__(self, control: VLLMControl, options: EngineOptions):
        super().__init__(control, options)
        found = re.match(r"(\d+)\.(\d+)", control.version)
        # What has no number was built by somebody, from what is newest.
        numbers = (int(found[1]), int(found[2])) if found else PACKED_BY_GROUP
        if numbers < FOUR_PHASES:
            raise UserError(
                f"weight_sync.route = engine: vLLM {control.version} updates weights in another way: take 0.22 or "
                "later, or another route"
            )
        self._packed_by_group = numbers >= PACKED_BY_GROUP
        self._ended_well = False

    def begin(self) -> None:
        ended_well, self._ended_well = self._ended_well, False
        if not ended_well:
            # Layers would count what they got in an update that broke off. The order fails where one is open already:
            # this agent's last one, or another agent's.
            with contextlib.suppress(EngineError):
                self._order("/start_weight_update")
            self._order("/finish_weight_update")
        self._order("/start_weight_update")

    def updates(self, tensors: Tensors, label: str) -> Iterator[tuple[dict[str, Any], Iterator[list[torch.Tensor]]]]:
        shapes = outlines(tensors)
        info = described(shapes, "dtype_names")
        pieces = ([in_one_piece(tensors[name] for name in names)] for names in chunks(shapes))
        yield {"update_info": info if self._packed_by_group else info | PACKING}, pieces

    def end(self, label: str) -> None:
        self._order("/finish_weight_update", {"weight_version": label})
        self._ended_well = True

    def leave(self) -> None:
        self._order("/shutdown_weight_transfer_engine")

    def make_group(self) -> Group:
        if not has_gpu():
            # With workers on CPUs, where NCCL is not: for a backend that meets over gloo, and reads what `nccl` reads.
            def invite(port: int) -> None:
                self._invite({"master_address": self._host, "master_port": port})

            return WeightGroup(GROUP, self._host, self._ranks, self._timeout_s, invite)
        from torchtitan.inference.agent.nccl_group import NcclWeightGroup

        if torch.cuda.device_count() <= self._ranks:
            raise EngineError(
                f"weight_sync.route engine needs a GPU more than the engine's {self._ranks}: NCCL gives the agent none "
                "that a worker has (CUDA_VISIBLE_DEVICES)"
            )
        device = torch.device("cuda", self._ranks)
        return NcclWeightGroup(
            self._ranks, device, self._timeout_s, lambda unique_id: self._invite({"nccl_unique_id_b64": unique_id})
        )

    def _invite(self, meeting: Mapping[str, Any]) -> None:
        info = {**meeting, "rank_offset": 1, "world_size": self._ranks + 1}
        self._order("/init_weight_transfer_engine", {"init_info": info | PACKING if self._packed_by_group else info})


def chunks(tensors: Mapping[str, torch.Tensor], size: int = BUFFER_BYTES) -> Iterator[list[str]]:
    """Names whose bytes travel as one, as vLLM cuts them: the tensor that makes it more than `size` is the last."""
    names: list[str] = []
    taken = 0
    for name, tensor in tensors.items():
        names.append(name)
        taken += tensor.nbytes
        if taken > size:
            yield names
            names, taken = [], 0
    if names:
        yield names
