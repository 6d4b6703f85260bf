"""A version into SGLang by its own weight group: the agent broadcasts, parameter by parameter.

Weaker than files: what the engine got is not checked by anybody, and a failure half-way leaves half a version.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping

import torch

from torchtitan.inference.agent.control import EngineError
from torchtitan.inference.agent.engine import EngineOptions
from torchtitan.inference.agent.group import Alongside, WeightGroup
from torchtitan.inference.agent.process import WILDCARDS
from torchtitan.inference.base_weights import outlines
from torchtitan.inference.sglang.control import SGLangControl
from torchtitan.weight_sync.staging import StagedVersion

# The engine allocates all tensors of one order before it loads them.
ORDER_BYTES = 512 * 2**20


class CollectiveHandOver:
    """One group per server, made when it is first needed and again after a failure."""

    workers = 0

    def __init__(self, control: SGLangControl, options: EngineOptions):
        self._control, self._timeout_s = control, options.update_timeout_s
        self._host, self._ranks = WILDCARDS.get(options.host, options.host), options.tensor_parallel_size
        self._group: WeightGroup | None = None
        self._name = ""

    def connected(self, leader: str, actor: str, epoch: str, token: str) -> None:
        """Nothing has to be told to the engine."""

    def prepare(self, staged: StagedVersion, label: str) -> None:
        if self._group is not None:
            return
        self._name = f"torchtitan-{secrets.token_hex(6)}"

        def invite(port: int) -> None:
            body = {"master_address": self._host, "master_port": port, "rank_offset": 1}
            body |= {"world_size": self._ranks + 1, "group_name": self._name, "backend": "gloo"}
            self._control.order("/init_weights_update_group", body, self._timeout_s)

        self._group = WeightGroup(self._name, self._host, self._ranks, self._timeout_s, invite)

    def load(self, staged: StagedVersion, label: str) -> None:
        assert self._group is not None
        orders = list(_orders(staged.tensors))
        try:
            for number, names in enumerate(orders):
                last = number == len(orders) - 1
                self._send(self._group, staged, names, label if last else None)
        except BaseException:
            self._drop_group()
            raise

    def close(self) -> None:
        self._drop_group()

    def _send(self, group: WeightGroup, staged: StagedVersion, names: list[str], label: str | None) -> None:
        tensors = [staged.tensors[name] for name in names]
        body = {
            "names": names,
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "group_name": self._name,
            # A flush that finds requests running ends SGLang's scheduler: the cache is reset by an order of its own.
            "flush_cache": False,
            "weight_version": label,
        }
        with Alongside(
            lambda: self._control.order("/update_weights_from_distributed", body, self._timeout_s)
        ) as loading:
            group.broadcast(tensors)
            loading.result(self._timeout_s)

    def _drop_group(self) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        group.close()
        try:
            self._control.order("/destroy_weights_update_group", {"group_name": self._name}, self._timeout_s)
        except EngineError:
            return  # the engine may be gone, or have lost the group as we have


def _orders(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Names in portions of at most ORDER_BYTES, one at least."""
    names: list[str] = []
    size = 0
    for name, tensor in outlines(tensors).items():
        if names and size + tensor.nbytes > ORDER_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    yield names
