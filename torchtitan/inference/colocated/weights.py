"""Weights for the engines in the trainer's own processes: each version is handed over at the step boundary, parameter
by parameter, and nothing ever holds a second copy of the model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import torch

from torchtitan.inference.colocated.pool import replica_name
from torchtitan.inference.colocated.replica import Replica
from torchtitan.inference.types import make_label
from torchtitan.models.decoder import Decoder
from torchtitan.models.lora import base_parameters, whole_weights
from torchtitan.weight_sync.facade import ActorStatus


class ColocatedWeights:
    """A trainer.weight_path.WeightPath that publishes every version: there is no slot to wait for."""

    def __init__(self, policy: Decoder, replica: Replica, replicas: int, epoch: str, dtype: torch.dtype):
        """replicas: of the model, over all ranks. dtype: in which the engines hold it."""
        self._policy = policy
        self._replica = replica
        self._replicas = replicas
        self._epoch = epoch
        self._dtype = dtype
        self._version = -1
        self._published = 0
        self._stall_s = 0.0
        self._generated_s = 0.0

    def commit(self, version: int, votes_against: int) -> str:
        """Hand `version` to the engine, on every rank. Also where the last step was dropped: these are its weights."""
        started = time.perf_counter()
        self._replica.load(self._tensors(), make_label(self._epoch, version))
        self._version = version
        self._published += 1
        self._stall_s += time.perf_counter() - started
        return "published"

    def actors(self) -> Mapping[str, ActorStatus]:
        status = ActorStatus("SERVING", self._epoch, self._version, "", self._version >= 0, False, "", 0)
        return {replica_name(number): status for number in range(self._replicas)}

    def statistics(self) -> dict[str, float]:
        generated = self._replica.busy_s
        figures = {
            "weight_sync/versions_published": float(self._published),
            "weight_sync/versions_skipped": 0.0,
            "time/snapshot_s": 0.0,
            "time/sync_stall_s": self._stall_s,
            "time/generate_s": generated - self._generated_s,
        }
        self._stall_s, self._generated_s = 0.0, generated
        return figures

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The whole model, one gathered parameter at a time (a collective where it is sharded)."""
        for name, whole in whole_weights(self._policy, base_parameters(self._policy)):
            yield name, whole.to(self._dtype)
