"""A broadcast group with the workers of an engine, of which the agent is rank 0; gloo, in host memory.

The engine's side makes its group with torch.distributed under the same name. Nothing of ours belongs to a default
group, and every step has a deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from torchtitan.inference.agent.control import EngineError


class WeightGroup:
    """The group `name` of 1 + `workers` ranks, at `address` of this machine.

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


class Alongside:
    """Runs `function` in a thread while the block does the other half of the same thing."""

    def __init__(self, function: Callable[[], None]):
        self._function = function
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="engine-order", daemon=True)

    def __enter__(self) -> Alongside:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._error is not None:
            # What the engine said explains more than that our half came to nothing.
            raise EngineError(f"{self._error} ({error})") from error

    def result(self, timeout_s: float) -> None:
        """Wait for it; raises what it raised, EngineError where it takes longer."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise EngineError(f"the engine did not answer within {timeout_s:g} s")
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._function()
        except Exception as error:
            self._error = error
