"""The engine of an actor whose workers hold the weights, and what engines may return."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial

from torchtitan.weight_sync.group import Leader, Outcome
from torchtitan.weight_sync.manifest import Layout, Manifest, WeightsRefused
from torchtitan.weight_sync.sockets import SocketRuntime
from torchtitan.weight_sync.staging import StagedVersion
from torchtitan.weight_sync.transfer import BucketKey

# While workers apply, it is looked so often whether somebody still hears of it.
LOOK_SECONDS = 0.2

ApplyFunction = Callable[[StagedVersion], "float | Mapping[str, float] | None"]


class LeadingEngine:
    """An engine whose workers stage their parts: nothing arrives here.

    lives(): whether the actor's loop still runs, which orders what workers do.
    """

    def __init__(self, apply: ApplyFunction, runtime: SocketRuntime, lives: Callable[[], bool]):
        self._apply, self._runtime, self._lives = apply, runtime, lives
        self.leader: Leader | None = None

    def prepare(self, layout: Layout) -> Collection[BucketKey]:
        """See puller.Engine."""
        return layout.bucket_keys()

    def apply(self, manifest: Manifest) -> Mapping[str, float]:
        """See puller.Engine."""
        begun, outcomes = time.monotonic(), list[Outcome]()

        def apply_on_workers() -> None:
            outcomes.append(self._on_workers(manifest))
            if outcomes[-1].error:
                raise (WeightsRefused if outcomes[-1].refused else RuntimeError)(outcomes[-1].error)

        staged = StagedVersion(manifest.epoch, manifest.version, manifest.digest, {}, apply_on_workers)
        try:
            cost = in_figures(self._apply(staged), begun)
        except WeightsRefused as error:
            if outcomes and not outcomes[-1].refused:
                raise RuntimeError(f"the workers have applied what the engine refuses: {error}") from error
            raise
        if not outcomes or outcomes[-1].error:
            raise RuntimeError("the engine did not have all workers apply the version")
        return {**outcomes[-1].figures, **cost}

    def _on_workers(self, manifest: Manifest) -> Outcome:
        assert self.leader is not None
        answered: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._runtime.post(partial(self.leader.order, manifest, answered.put))
        while True:  # the leader answers within its deadline, as long as its loop runs
            with contextlib.suppress(queue.Empty):
                return answered.get(timeout=LOOK_SECONDS)
            if not self._lives():
                return Outcome("the connection to the trainer was closed meanwhile", False, {})


def in_figures(cost: float | Mapping[str, float] | None, begun: float) -> dict[str, float]:
    """What an engine returned, by name."""
    named = cost if isinstance(cost, Mapping) else {} if cost is None else {"pause_s": cost}
    return {"pause_s": time.monotonic() - begun, **{str(name): float(value) for name, value in named.items()}}
