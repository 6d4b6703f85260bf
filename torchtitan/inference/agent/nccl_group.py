"""A broadcast group with the GPUs of an engine, of which the agent is rank 0; NCCL, on a GPU that no worker has.

The two sides have nothing in common but NCCL's unique id, so that any communicator can be the other one; what they
compute first is a sum of one number.
"""

from __future__ import annotations

import base64
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.inference.agent.alongside import Alongside
from torchtitan.inference.agent.control import EngineError
from torchtitan.weight_sync.transports.communicator import Broken, PairStore, nccl_group

UNIQUE_ID_BYTES = 128
POLL_S = 1e-4


class NcclWeightGroup:
    """The group of 1 + `workers` ranks; this one uses `device`.

    invite(unique id, in base64) has the engine join; it is called in a thread, and returns when the engine has. Blocks
    until all are there; raises EngineError, also where that takes more than `timeout_s`.
    """

    def __init__(self, workers: int, device: torch.device, timeout_s: float, invite: Callable[[str], None]):
        self._device, self._timeout_s = device, timeout_s
        self._stream = torch.cuda.Stream(device)
        unique_id: list[bytes] = []
        known = threading.Event()
        self._alone = threading.Event()

        def heard(_key: str, value: bytes) -> None:
            # torch puts it into the store for the other ranks, which here are not torch's.
            if len(value) == UNIQUE_ID_BYTES and not unique_id:
                unique_id.append(value)
                known.set()

        def join() -> None:
            if not known.wait(timeout_s):
                raise EngineError("NCCL gave no unique id")
            try:
                invite(base64.b64encode(unique_id[0]).decode())
            except BaseException:
                self._alone.set()
                raise

        self._group: Any = None
        try:
            with Alongside(join) as joining:
                self._group = nccl_group(PairStore(heard, timeout_s), 0, workers + 1, device)
                self._finish(lambda: self._group.allreduce([torch.zeros(1, device=device)]))
                joining.result(timeout_s)
        except (Broken, RuntimeError, ValueError, EngineError) as error:
            self.close()
            raise EngineError(f"no weight group with the engine: {error}") from error

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors, in this order, to all workers. Raises EngineError; the group is of no use then."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            for tensor in tensors:
                with torch.cuda.stream(self._stream):
                    here = tensor.to(self._device).contiguous()
                self._finish(lambda here=here: self._group.broadcast([here], options))  # type: ignore[misc]
        except (Broken, RuntimeError) as error:
            raise EngineError(f"the engine did not take the tensors: {error}") from error

    def close(self) -> None:
        """End what is under way here. A worker that waits in NCCL goes on waiting: only its process's end ends that."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.abort()

    def _finish(self, launch: Callable[[], Any]) -> None:
        with torch.cuda.stream(self._stream):
            work = launch()
        deadline = time.monotonic() + self._timeout_s
        while not work.is_completed():
            if self._alone.is_set() or time.monotonic() > deadline:
                self.close()
                raise Broken("nobody joins" if self._alone.is_set() else f"NCCL was at it for {self._timeout_s:g} s")
            time.sleep(POLL_S)
