"""A version into vLLM by its own weight group: the agent broadcasts whole tensors, packed into large pieces.

The server has vLLM's backend `nccl` and nothing of ours. Weaker than our own backend: nobody checks that all arrives as
it was sent, and a failure half-way leaves half a version.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from torchtitan.errors import UserError
from torchtitan.inference.agent.control import EngineError
from torchtitan.inference.agent.engine import EngineOptions
from torchtitan.inference.agent.group import Alongside, WeightGroup
from torchtitan.inference.agent.process import WILDCARDS
from torchtitan.inference.base_weights import outlines
from torchtitan.inference.vllm.control import VLLMControl
from torchtitan.inference.vllm.transfer import TransferDialect, chunks
from torchtitan.utils.gpus import has_gpu
from torchtitan.weight_sync.staging import StagedVersion

# Every group has a store of its own.
GROUP = "weights"


class Group(Protocol):
    def broadcast(self, tensors: list[torch.Tensor]) -> None: ...

    def close(self) -> None: ...


class CollectiveHandOver:
    """One group per server, made when it is first needed and again after a failure."""

    workers = 0

    def __init__(self, control: VLLMControl, options: EngineOptions):
        self._control, self._timeout_s = control, options.update_timeout_s
        self._host, self._ranks = WILDCARDS.get(options.host, options.host), options.tensor_parallel_size
        try:
            self._dialect = TransferDialect(control.version)
        except ValueError as error:
            raise UserError(f"weight_sync.route = engine: {error}") from None
        self._group: Group | None = None
        self._begins_clean = False

    def connected(self, leader: str, actor: str, epoch: str, token: str) -> None:
        """Nothing has to be told to the engine."""

    def prepare(self, staged: StagedVersion, label: str) -> None:
        if self._group is None:
            self._group = self._gpu_group() if has_gpu() else self._host_group()

    def load(self, staged: StagedVersion, label: str) -> None:
        assert self._group is not None
        try:
            self._begin()
            body = self._dialect.update(outlines(staged.tensors))
            with Alongside(lambda: self._order("/update_weights", body)) as loading:
                for piece in _packed(staged.tensors):
                    self._group.broadcast([piece])
                loading.result(self._timeout_s)
            self._order("/finish_weight_update", {"weight_version": label})
        except BaseException:
            self._begins_clean = False
            self._drop_group()
            raise
        self._begins_clean = True

    def close(self) -> None:
        self._drop_group()

    def _begin(self) -> None:
        """An update that takes nothing over from one that broke off: its layers would count what they had got."""
        if not self._begins_clean:
            # It fails where one is open already: this agent's last one, or another agent's.
            with contextlib.suppress(EngineError):
                self._order("/start_weight_update")
            self._order("/finish_weight_update")
        self._order("/start_weight_update")

    def _host_group(self) -> Group:
        """With workers on CPUs, where NCCL is not: for a backend that meets over gloo, and reads what `nccl` reads."""

        def invite(port: int) -> None:
            self._invite({"master_address": self._host, "master_port": port})

        return WeightGroup(GROUP, self._host, self._ranks, self._timeout_s, invite)

    def _gpu_group(self) -> Group:
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
        self._order("/init_weight_transfer_engine", self._dialect.init(meeting, self._ranks))

    def _drop_group(self) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        group.close()
        try:
            self._order("/shutdown_weight_transfer_engine")
        except EngineError:
            return  # the engine may be gone, or have lost the group as we have

    def _order(self, path: str, body: dict[str, Any] | None = None) -> None:
        self._control.order(path, body or {}, self._timeout_s)


def _packed(tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """The bytes of all tensors in the pieces in which they travel."""
    for names in chunks(outlines(tensors)):
        yield torch.cat([tensors[name].contiguous().reshape(-1).view(torch.uint8) for name in names])
