"""vLLM's side of the weight synchronisation: a weight-transfer backend that stages versions while requests run, and
looks whether vLLM computes with what was sent.

Every worker of the tensor-parallel group hosts a Worker of the weight synchronisation, which pulls its share of each
version in threads of its own into memory that all of them share. The agent beside the engine leads them: when a version
is staged and the engine stands still, it orders them to apply and calls vLLM's /update_weights, and the two meet here:
the engine's own thread loads the staged tensors, and every worker takes from each what it computes with. Runs inside
vLLM's worker processes.

Many layers compute with a packed copy of their weight, which cannot be read. But a linear layer that is given rows of
the identity matrix answers with its weight, and exactly: each of its sums has one product that is not zero. What that
weight should be is made once more, by the layer's own loader from the version in staging memory.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

from torchtitan.distributed.device import queued_copy
from torchtitan.inference.engines.vllm.direct import Mailbox
from torchtitan.inference.engines.vllm.live_check import Comparison, LiveWeightChecker, answers, same
from torchtitan.inference.engines.vllm.loading import METHODS, PACKED, LoadRecord, LoadRecorder, load_weights
from torchtitan.inference.serving.weight_verification import MAX_MISMATCHED, BaseWeights, Verified
from torchtitan.utils.machine import keep_freed_memory, return_freed_memory
from torchtitan.weight_sync.actor.actor import Worker
from torchtitan.weight_sync.actor.puller import Served
from torchtitan.weight_sync.memory.staging import StagedTensors, StagedVersion, WeightsRefused

logger = logging.getLogger(__name__)

# The agent orders both sides at about the same time.
MEETING_SECONDS = 10.0


def comparisons(model: nn.Module, loads: Iterable[LoadRecord], tensors: StagedTensors) -> Iterator[Comparison]:
    """What the model computes with against what it should."""
    for load in loads:
        if any(name not in tensors for name, _ in load.calls):
            continue
        live = getattr(load.layer, load.parameter)
        # Where it is staged: loaders would copy from host memory to a device each piece by itself, and wait for it.
        with tensors.to_copy(load.calls[0][0]).device:
            wanted = materialize_meta_tensor(load.empty).fill_(torch.nan)
        for name, arguments in load.calls:
            load.loader(wanted, tensors.to_copy(name), **arguments)
            yield Comparison(name, None)
        if wanted.device != live.device:
            wanted = queued_copy(wanted, live.device)
        parameter_names = ", ".join(name for name, _ in load.calls)
        if live.shape == wanted.shape:
            yield Comparison(parameter_names, same(live, wanted))
        # A tied head has the embedding's parameter, and perhaps a packed copy of its own.
        for layer in model.modules():
            looked_up = type(layer) is VocabParallelEmbedding and PACKED not in layer.__dict__
            # The weight of a convolution [channels, 1, tokens] is in a linear layer that nobody calls.
            multiplies = type(getattr(layer, "quant_method", None)) in METHODS and not looked_up and wanted.dim() < 3
            if multiplies and layer._parameters.get(load.parameter) is live:
                method: Any = layer.quant_method
                for found in answers(functools.partial(method.apply, layer), wanted):
                    yield Comparison(parameter_names, found)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Body of /init_weight_transfer_engine: pull as the workers of `actor`, led by the agent at `leader`."""

    leader: str
    actor: str
    epoch: str
    key: str = field(repr=False)
    """The actor's"""
    stage_on_device: bool = False
    """Where there is one worker; transports between devices need it, elsewhere the host's memory is the cheaper one"""
    load_timeout_s: float = 60.0
    verify_every: int = 0
    """Versions from one look at the weights in use to the next, 0 for none"""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Body of /update_weights: load the version that is staged under these names."""

    epoch: str
    version: int
    digest: str


class ReceivingBackend(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One per worker.

    Loading happens as a whole in update_weights: what comes before and after it can be called in vain.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = vllm_config.parallel_config
        for name in ("pipeline_parallel_size", "data_parallel_size"):
            if getattr(parallel, name, 1) != 1:
                # The workers of one tensor-parallel group share a version.
                raise ValueError(f"the torchtitan weight-transfer backend needs {name} = 1: start more servers instead")
        self._mailbox = Mailbox()
        # Now: loading from files makes their folder the model's.
        self._base = BaseWeights(vllm_config.model_config.model, device)
        self._worker: Worker | None = None
        self.checker: LiveWeightChecker | None = None
        """Looks at the weights in use, where versions are verified"""
        self._recorder = LoadRecorder()
        self._holds: Served | None = None
        """What the model holds since the last load; None: its checkpoint, or half a version"""

    # Called by vLLM on the engine's thread, on all ranks

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """(Re)connect to the agent. Replaces an earlier connection."""
        self._stop_receiving("another connection has taken this one's place")
        self._mailbox = mailbox = Mailbox()

        def apply(staged: StagedVersion) -> None:
            try:
                merged = self._base.merged(staged)
            except WeightsRefused as refusal:
                mailbox.refuse(staged, str(refusal))
                raise
            mailbox.offer(merged, MEETING_SECONDS, init_info.load_timeout_s)

        holds = self._holds
        if holds is not None and holds.epoch != init_info.epoch:
            holds = None
        group = get_tp_group()
        stages_on_device = init_info.stage_on_device and group.world_size == 1
        self._worker = Worker(
            init_info.leader,
            init_info.actor,
            group.rank_in_group,
            init_info.epoch,
            init_info.key,
            apply,
            shares=not stages_on_device,
            served=holds,
            where=str(self.device) if stages_on_device else "cpu",
        )
        if init_info.verify_every:
            self.checker = LiveWeightChecker(
                init_info.verify_every, self._found_torn, self._comparisons, self.device, self._report_verified
            )
        self._worker.start()

    def _found_torn(self, _epoch: str, version: int, reason: str, in_a_row: int) -> None:
        assert self._worker is not None
        self._worker.poison_version(version, reason)
        if in_a_row >= MAX_MISMATCHED:
            # Ends the engine; the supervisor of the agent starts a fresh one.
            raise RuntimeError(f"{in_a_row} versions in a row did not arrive whole: {reason}")

    def _comparisons(self, tensors: StagedTensors) -> Iterator[Comparison] | None:
        loads = list(self._recorder.loads.values())
        return comparisons(self.model, loads, tensors) if loads else None

    def _report_verified(self, status: Verified) -> None:
        assert self._worker is not None
        self._worker.tell_verified(status.version, status.matched, status.mismatched, status.unfinished)

    def start_weight_update(self) -> None:
        """Nothing: see update_weights."""

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Load the staged version. Raises RuntimeError where that fails: the agent counts none of the workers then."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """As update_weights."""
        wanted = update_info.epoch, update_info.version, update_info.digest
        staged = self._mailbox.load(wanted, self._load, self.device, MEETING_SECONDS)
        if staged is not None:
            self._holds = Served(*wanted)
            if self.checker is not None:
                self.checker.applied(staged)

    def _load(self, staged: StagedVersion) -> None:
        self._holds = None
        if self.checker is not None:
            self.checker.replacing()
        if self.device.type == "cpu":
            # The next version needs the same buffers; without this up to half of a load is page faults. Not before the
            # first one: what the engine's start has freed has gone back.
            keep_freed_memory(large=True)
        try:
            load_weights(self.model, self.model_config, staged.tensors, self._recorder)
        except Exception:
            return_freed_memory()
            raise

    def finish_weight_update(self) -> None:
        """Nothing: see update_weights."""

    def shutdown(self) -> None:
        self._stop_receiving("the engine ends")

    def _stop_receiving(self, reason: str) -> None:
        self._mailbox.close(reason)
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
        self.checker = None

    @property
    def verified_version(self) -> int | None:
        """The last version that was looked at, and found whole."""
        return None if self.checker is None else self.checker.status.version
