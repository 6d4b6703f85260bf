"""Adapters through an agent: merged while the engine generates, then handed over as any whole version."""

from __future__ import annotations

from torchtitan.inference.agent.engine import EngineOptions
from torchtitan.inference.agent.hand_over import HandOver
from torchtitan.inference.base_weights import BaseWeights
from torchtitan.weight_sync.staging import StagedVersion, WeightsRefused


def merging(hand_over: HandOver, options: EngineOptions) -> HandOver:
    """`hand_over`, which is given whole versions only; with workers inside the engine these merge for themselves."""
    return hand_over if hand_over.workers else MergingHandOver(hand_over, BaseWeights(options.model))


class MergingHandOver:
    """See agent.hand_over.HandOver."""

    workers = 0

    def __init__(self, inner: HandOver, base: BaseWeights):
        self._inner, self._base = inner, base
        self._whole: StagedVersion | None = None

    def connected(self, leader: str, actor: str, epoch: str, token: str) -> None:
        self._inner.connected(leader, actor, epoch, token)

    def prepare(self, staged: StagedVersion, label: str) -> None:
        self._whole = self._base.whole(staged)
        self._inner.prepare(self._whole, label)

    def load(self, staged: StagedVersion, label: str) -> None:
        whole, self._whole = self._whole, None
        if whole is None:
            raise WeightsRefused("nothing was prepared")
        self._inner.load(whole, label)

    def close(self) -> None:
        self._inner.close()
