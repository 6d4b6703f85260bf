"""vLLM's side of the weight synchronisation: a weight-transfer backend that stages versions while requests run.

The first worker of the tensor-parallel group hosts a weight_sync Worker, which receives and verifies in threads of its
own. The agent beside the engine leads it: when a version is staged and the engine stands still, the agent orders the
worker to apply and calls vLLM's /update_weights, and the two meet here: the engine's own thread loads the staged
tensors, on all ranks. Runs inside vLLM's worker processes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from torchtitan.inference.base_weights import BaseWeights
from torchtitan.inference.vllm.loading import load_weights
from torchtitan.inference.vllm.mailbox import Mailbox
from torchtitan.inference.vllm.spreading import Spread
from torchtitan.utils.machine import keep_freed_memory, return_freed_memory
from torchtitan.weight_sync.staging import StagedVersion, WeightsRefused
from torchtitan.weight_sync.states.receiver import Served
from torchtitan.weight_sync.worker import Worker

logger = logging.getLogger(__name__)

# The agent orders both sides at about the same time.
MEETING_SECONDS = 10.0


@dataclass
class Joining(WeightTransferInitInfo):
    """Body of /init_weight_transfer_engine: receive as worker 0 of `actor`, led by the agent at `leader`."""

    leader: str
    actor: str
    epoch: str
    token: str = field(repr=False)
    host: str = "127.0.0.1"
    """Address that weights are received on"""
    stage_on_device: bool = False
    """Transports between devices need it; elsewhere the host's memory is the cheaper one"""
    load_timeout_s: float = 60.0


@dataclass
class Version(WeightTransferUpdateInfo):
    """Body of /update_weights: load the version that is staged under these names."""

    epoch: str
    version: int
    digest: str


class ReceivingBackend(WeightTransferEngine[Joining, Version]):
    """One per worker; only the first rank's receives.

    Loading happens as a whole in update_weights: what comes before and after it can be called in vain.
    """

    init_info_cls = Joining
    update_info_cls = Version
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = vllm_config.parallel_config
        for name in ("pipeline_parallel_size", "data_parallel_size"):
            if getattr(parallel, name, 1) != 1:
                # One receiving worker spreads a version over one tensor-parallel group.
                raise ValueError(f"the torchtitan weight-transfer backend needs {name} = 1: start more servers instead")
        self._mailbox = Mailbox()
        # Now: loading from files makes their folder the model's.
        self._base = BaseWeights(vllm_config.model_config.model, device)
        self._worker: Worker | None = None
        self._holds: Served | None = None
        """What the model holds since the last load; None: its checkpoint, or half a version"""

    # Called by vLLM on the engine's thread, on all ranks

    def init_transfer_engine(self, init_info: Joining) -> None:
        """(Re)connect to the agent. Replaces an earlier connection."""
        if get_tp_group().rank_in_group != 0:
            return
        self._stop_receiving("another connection has taken this one's place")
        self._mailbox = mailbox = Mailbox()

        def apply(staged: StagedVersion) -> None:
            try:
                whole = self._base.whole(staged)
            except WeightsRefused as refusal:
                mailbox.refuse(staged, str(refusal))
                raise
            mailbox.offer(whole, MEETING_SECONDS, init_info.load_timeout_s)

        holds = self._holds if self._holds is not None and self._holds.epoch == init_info.epoch else None
        self._worker = Worker(
            init_info.leader,
            init_info.actor,
            0,
            init_info.epoch,
            init_info.token,
            apply,
            None,
            host=init_info.host,
            served=holds,
            where=str(self.device) if init_info.stage_on_device else "cpu",
        )
        self._worker.start()

    def start_weight_update(self) -> None:
        """Nothing: see update_weights."""

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Load the staged version on all ranks. Raises RuntimeError on all where one fails."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Version) -> None:
        """Load the staged version on all ranks. Raises RuntimeError on all where one fails."""
        group = get_tp_group()
        tensors, missing = None, ""
        if group.rank_in_group == 0:
            try:
                wanted = (update_info.epoch, update_info.version, update_info.digest)
                tensors = self._mailbox.take(*wanted, MEETING_SECONDS).tensors
            except LookupError as failure:
                missing = str(failure)
        spread = Spread(group, self.device, tensors, missing)
        self._holds = None
        if self.device.type == "cpu":
            # The next version needs the same buffers; without this up to half of a load is page faults. Not before the
            # first one: what the engine's start has freed has gone back.
            keep_freed_memory(large=True)
        error: str | None = None
        try:
            load_weights(self.model, self.model_config, spread)
        except Exception as failure:
            logger.exception("loading version %d failed", update_info.version)
            error = repr(failure)
            return_freed_memory()
        spread.drain()
        error = spread.agree(error)
        # Too late is as good as failed: the agent has given the version up, and must not be told that it is held.
        if self._mailbox.finish(error) and error is None:
            self._holds = Served(update_info.epoch, update_info.version, update_info.digest)
        if error is not None:
            raise RuntimeError(error)

    def finish_weight_update(self) -> None:
        """Nothing: see update_weights."""

    def shutdown(self) -> None:
        self._stop_receiving("the engine ends")

    def _stop_receiving(self, reason: str) -> None:
        self._mailbox.close(reason)
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
