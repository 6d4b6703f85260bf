"""The direct way into vLLM: our backend inside the engine has staged the version already, and loads it in place. Here
are the agent's orders, and the hand-over from the pulling thread to the engine's. No vLLM here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

import torch

from torchtitan.distributed import device
from torchtitan.inference.engines.sidecar.foreign_engine import EngineControl, EngineError, EngineOptions, WeightLoader
from torchtitan.weight_sync.actor.actor import SyncActor
from torchtitan.weight_sync.memory.staging import StagedVersion, WeightsRefused

logger = logging.getLogger(__name__)


class DirectLoader(WeightLoader):
    """options.tensor_parallel_size: the workers that the engine has."""

    def __init__(self, control: EngineControl, options: EngineOptions):
        self.workers = options.tensor_parallel_size
        self._control, self._timeout_s = control, options.update_timeout_s
        self._options = {
            "stage_on_device": options.stage_on_device,
            "load_timeout_s": options.update_timeout_s,
            "verify_every": options.verify_every,
        }

    def connected(self, weights: SyncActor) -> None:
        joining = {
            "leader": weights.workers_address,
            "actor": weights.name,
            "epoch": weights.epoch,
            "key": weights.key,
            **self._options,
        }
        self._control.order("/init_weight_transfer_engine", {"init_info": joining})

    # No `prepare`: the engine's workers have staged it, and an order to the engine would wait for a step that runs.

    def load(self, staged: StagedVersion, label: str) -> None:
        self._begin()
        assert staged.apply_on_workers is not None
        wanted = {"epoch": staged.epoch, "version": staged.version, "digest": staged.digest}
        # The two meet in each worker: its puller, which offers the version, and the engine's thread, which takes it.
        offering: Future[object] = Future()
        threading.Thread(target=_run, args=(staged.apply_on_workers, offering), name="offering", daemon=True).start()
        failure: BaseException | None = None
        try:
            self._control.order("/update_weights", {"update_info": wanted}, self._timeout_s)
        except EngineError as error:
            failure = error
        late = EngineError(f"the engine's workers did not answer within {self._timeout_s:g} s")
        refusal = offering.exception() if wait([offering], self._timeout_s).done else late
        # They refuse only what the engine's thread has not taken, and will not.
        if isinstance(refusal, WeightsRefused) or failure is None:
            failure = refusal
        if failure is not None:
            raise failure
        self._control.order("/finish_weight_update", {"weight_version": label})

    def _begin(self) -> None:
        """Begin an update, which for our backend is a formality."""
        try:
            self._control.order("/start_weight_update", {})
            return
        except EngineError as error:
            logger.info("%s; it is tried again after /finish_weight_update", error)
        try:
            # One was left open: by a refused version, or by an agent that ended. Our backend loads in a single step, so
            # there is nothing half done behind it.
            self._control.order("/finish_weight_update", {})
            self._control.order("/start_weight_update", {})
        except EngineError as error:
            raise WeightsRefused(f"the engine did not begin the update: {error}") from error


def _run(function: Callable[[], object], future: Future[object]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


class Mailbox:
    """Room for one version. `offer` blocks the receiver's apply thread while the engine's thread has the tensors."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._staged: StagedVersion | None = None
        self._taken = False
        self._finished = False
        self._error: str | None = None
        self._refused: tuple[tuple[str, int, str], str] | None = None
        self._closed: str | None = None

    def offer(self, staged: StagedVersion, pickup_timeout_s: float, load_timeout_s: float) -> None:
        """Return once the engine holds the version.

        Raises:
            WeightsRefused: the engine did not take it within `pickup_timeout_s`, and will not: it is as it was.
            RuntimeError: loading failed, took longer than `load_timeout_s`, or the mailbox was closed meanwhile.
        """
        with self._changed:
            if self._closed is not None:
                raise WeightsRefused(self._closed)
            self._staged, self._taken, self._finished, self._error = staged, False, False, None
            self._refused = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._taken or self._closed is not None, pickup_timeout_s)
            if not self._taken:
                self._staged = None
                reason = self._closed or f"the engine did not take the version within {pickup_timeout_s:g} s"
                raise WeightsRefused(reason)
            self._changed.wait_for(lambda: self._finished or self._closed is not None, load_timeout_s)
            self._staged = None
            if not self._finished:
                raise RuntimeError(self._closed or f"the engine did not load the version within {load_timeout_s:g} s")
            if self._error is not None:
                raise RuntimeError(self._error)

    def refuse(self, staged: StagedVersion, reason: str) -> None:
        """This version is not offered, nor will be: the engine need not wait for it."""
        with self._changed:
            self._refused = (staged.epoch, staged.version, staged.digest), reason
            self._changed.notify_all()

    def take(self, epoch: str, version: int, digest: str, timeout_s: float) -> StagedVersion:
        """The engine's thread: the version that is offered. Raises LookupError where that very one does not come."""
        deadline = time.monotonic() + timeout_s
        wanted = (epoch, version, digest)

        def matches() -> bool:
            staged = self._staged
            return staged is not None and not self._taken and (staged.epoch, staged.version, staged.digest) == wanted

        def why_not() -> str | None:
            return self._refused[1] if self._refused is not None and self._refused[0] == wanted else None

        with self._changed:
            self._changed.wait_for(lambda: matches() or why_not() is not None, max(0.0, deadline - time.monotonic()))
            if not matches():
                raise LookupError(why_not() or f"version {version} of epoch {epoch} is not staged here")
            self._taken = True
            self._changed.notify_all()
            assert self._staged is not None
            return self._staged

    def finish(self, error: str | None) -> bool:
        """The engine's thread: it has loaded what it took, or why not. Returns whether its offer still waited."""
        with self._changed:
            waited = self._staged is not None and self._taken
            # An offer that came after the one that was taken must not be told that it is loaded.
            if waited:
                self._finished, self._error = True, error
                self._changed.notify_all()
            return waited

    def load(
        self,
        wanted: tuple[str, int, str],
        load: Callable[[StagedVersion], None],
        where: torch.device,
        pickup_timeout_s: float,
    ) -> StagedVersion | None:
        """The engine's thread: load(staged) the version that is offered, and tell the offer how it ended.

        wanted: epoch, version and digest. where: the engine's device. Returns the version if the engine holds it and
        its offer still waited: too late is as good as failed, because the agent has given the version up.

        Raises:
            RuntimeError: the version was not offered, or load() failed.
        """
        try:
            staged = self.take(*wanted, pickup_timeout_s)
        except LookupError as failure:
            raise RuntimeError(str(failure)) from failure
        error: str | None = None
        try:
            load(staged)
            # A device's copies are only queued, and the next version may come into what they read.
            device.synchronize(where)
        except Exception as failure:
            logger.exception("loading version %d failed", staged.version)
            error = repr(failure)
        waited = self.finish(error)
        if error is not None:
            raise RuntimeError(error)
        return staged if waited else None

    def close(self, reason: str) -> None:
        """Nothing is handed over any more; those who wait are told why."""
        with self._changed:
            self._closed = reason
            self._changed.notify_all()
