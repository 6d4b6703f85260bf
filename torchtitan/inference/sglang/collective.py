"""A version into SGLang by its own weight group: the agent broadcasts, bucket by bucket.

Weaker than files: what the engine got is not checked by anybody, and a failure half-way leaves half a version.
"""

from __future__ import annotations

import contextlib
import secrets
from typing import Any

from torchtitan.inference.agent.control import EngineError
from torchtitan.inference.agent.engine import EngineOptions
from torchtitan.inference.agent.group import Alongside, WeightGroup
from torchtitan.inference.agent.process import WILDCARDS
from torchtitan.inference.base_weights import outlines
from torchtitan.inference.sglang.control import SGLangControl
from torchtitan.inference.sglang.transfer import TransferDialect, buckets
from torchtitan.weight_sync.staging import StagedVersion


class CollectiveHandOver:
    """One group per server, made when it is first needed and again after a failure."""

    workers = 0

    def __init__(self, control: SGLangControl, options: EngineOptions):
        self._control, self._timeout_s = control, options.update_timeout_s
        self._host, self._ranks = WILDCARDS.get(options.host, options.host), options.tensor_parallel_size
        self._group: WeightGroup | None = None
        self._name = ""
        self._dialect = TransferDialect("")

    def connected(self, leader: str, actor: str, epoch: str, token: str) -> None:
        """Nothing has to be told to the engine."""

    def prepare(self, staged: StagedVersion, label: str) -> None:
        if self._group is not None:
            return
        # Asked for every group: a server that somebody else started may have been started anew as another version.
        self._dialect = TransferDialect(self._control.version())
        self._name = f"torchtitan-{secrets.token_hex(6)}"

        def invite(port: int) -> None:
            body = {"master_address": self._host, "master_port": port, "rank_offset": 1}
            # Also with GPUs, where SGLang copies to its own: NCCL would need one that no worker has, and nobody tried.
            body |= {"world_size": self._ranks + 1, "group_name": self._name, "backend": "gloo"}
            self._order("/init_weights_update_group", body)

        self._group = WeightGroup(self._name, self._host, self._ranks, self._timeout_s, invite)

    def load(self, staged: StagedVersion, label: str) -> None:
        assert self._group is not None
        portions = list(buckets(outlines(staged.tensors)))
        try:
            if self._dialect.sessions:
                self._begin()
            for names in portions:
                self._send(self._group, staged, names, label if names is portions[-1] else None)
            if self._dialect.sessions:
                self._order("/end_weight_update", {})
        except BaseException:
            self._drop_group()
            raise

    def close(self) -> None:
        self._drop_group()

    def _begin(self) -> None:
        try:
            self._order("/begin_weight_update", {})
        except EngineError:
            # An update that broke off, this agent's or another's, has left one open.
            with contextlib.suppress(EngineError):
                self._order("/end_weight_update", {})
            self._order("/begin_weight_update", {})

    def _send(self, group: WeightGroup, staged: StagedVersion, names: list[str], label: str | None) -> None:
        tensors = {name: staged.tensors[name] for name in names}
        pieces = self._dialect.pieces(tensors)
        body = self._dialect.update(tensors) | {
            "group_name": self._name,
            # A flush that finds requests running ends SGLang's scheduler: the cache is reset by an order of its own.
            "flush_cache": False,
            "weight_version": label,
        }
        with Alongside(lambda: self._order("/update_weights_from_distributed", body)) as loading:
            group.broadcast(pieces)
            loading.result(self._timeout_s)

    def _order(self, path: str, body: dict[str, Any]) -> None:
        self._control.order(path, body, self._timeout_s)

    def _drop_group(self) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        group.close()
        try:
            self._order("/destroy_weights_update_group", {"group_name": self._name})
        except EngineError:
            return  # the engine may be gone, or have lost the group as we have
