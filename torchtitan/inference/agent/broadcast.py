"""A version by an engine's own broadcast group, of which the agent is rank 0.

Weaker than the other ways: nobody checks that all arrives as it was sent, and a failure half-way leaves half a version.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from torchtitan.inference.agent.alongside import Alongside
from torchtitan.inference.agent.control import EngineControl, EngineError
from torchtitan.inference.agent.engine import WILDCARDS, EngineOptions
from torchtitan.inference.agent.loading import WeightLoader
from torchtitan.weight_sync.staging import StagedVersion

Tensors = Mapping[str, torch.Tensor]


class Group(Protocol):
    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors, in this order, to all workers. Raises EngineError; the group is of no use then."""

    def close(self) -> None: ...


class BroadcastLoader(WeightLoader):
    """One group per server, made when it is first needed and again after a failure. A class of each engine says what
    the server is told."""

    update_route: ClassVar[str]

    def __init__(self, control: EngineControl, options: EngineOptions):
        self._control, self._timeout_s = control, options.update_timeout_s
        self._host, self._ranks = WILDCARDS.get(options.host, options.host), options.tensor_parallel_size
        self._group: Group | None = None

    def make_group(self) -> Group:
        raise NotImplementedError

    def begin(self) -> None:
        """An update that takes nothing over from one that broke off."""
        raise NotImplementedError

    def updates(self, tensors: Tensors, label: str) -> Iterable[tuple[dict[str, Any], Iterable[list[torch.Tensor]]]]:
        """The body of each order, and what is broadcast for it: each list at once."""
        raise NotImplementedError

    def end(self, label: str) -> None:
        raise NotImplementedError

    def leave(self) -> None:
        """Have the server give up its half of the group. Raises EngineError."""
        raise NotImplementedError

    def prepare(self, staged: StagedVersion, label: str) -> None:
        if self._group is None:
            self._group = self.make_group()

    def load(self, staged: StagedVersion, label: str) -> None:
        assert self._group is not None
        try:
            self.begin()
            for body, broadcasts in self.updates(staged.tensors, label):
                with Alongside(functools.partial(self._order, self.update_route, body)) as loading:
                    for tensors in broadcasts:
                        self._group.broadcast(tensors)
                    loading.result(self._timeout_s)
            self.end(label)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()
            # The engine may be gone, or have lost the group as we have.
            with contextlib.suppress(EngineError):
                self.leave()

    def _order(self, path: str, body: dict[str, Any] | None = None) -> None:
        self._control.order(path, body or {}, self._timeout_s)


def described(tensors: Tensors, types: str) -> dict[str, Any]:
    """What an engine is told of tensors that come in this order; `types`: its name for their types."""
    return {
        "names": list(tensors),
        types: [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def in_one_piece(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """All their bytes, one behind the other."""
    return torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])


class WeightGroup:
    """The group `name` of 1 + `workers` ranks, at `address` of this machine; gloo, in host memory.

    The engine's side makes its group with torch.distributed under the same name. Nothing of ours belongs to a default
    group, and every step has a deadline.

    invite(port) has the engine join; it is called in a thread, and returns when the engine has. Blocks until all are
    there; raises EngineError, also where that takes more than `timeout_s`.
    """

    def __init__(self, name: str, address: str, workers: int, timeout_s: float, invite: Callable[[int], None]):
        limit = timedelta(seconds=timeout_s)
        # Waiting for the workers comes later: the port has to be known first.
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                address, 0, workers + 1, True, limit, wait_for_workers=False
            )
            with Alongside(lambda: invite(store.port)) as joining:
                options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                options._timeout = limit
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
                options._threads = 2
                # Where torch.distributed puts the keys of a gloo group of this name.
                keys = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
                # Ranks that meet at a store by torch's `tcp://` count themselves, and wait for all.
                store.add("init/", 1)
                self._group: Any = dist.ProcessGroupGloo(keys, 0, workers + 1, options)
                joining.result(timeout_s)
        except (RuntimeError, OSError, ValueError) as error:
            raise EngineError(f"no weight group with the engine: {error}") from error
        self._store: Any = store
        self._limit = limit

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors, in this order, to all workers. Raises EngineError; the group is of no use then."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            # Launched before any is waited for, as the engine's side does.
            works = [self._group.broadcast([tensor.contiguous()], options) for tensor in tensors]
            for work in works:
                work.wait(self._limit)
        except RuntimeError as error:
            raise EngineError(f"the engine did not take the tensors: {error}") from error

    def close(self) -> None:
        """Let go of sockets and threads."""
        group, self._group, self._store = self._group, None, None
        if group is not None:
            group.abort()
