"""The direct way into vLLM: our backend inside the engine has staged the version already, and loads it in place."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from torchtitan.inference.agent.engine import EngineControl, EngineError, WeightLoader
from torchtitan.weight_sync.actor import Actor
from torchtitan.weight_sync.staging import StagedVersion, WeightsRefused


class Alongside:
    """Runs `function` in a thread, while an engine does its half of the same thing and answers when it is done.

    who: what does that half, for messages.
    """

    def __init__(self, function: Callable[[], Any], who: str = "the engine"):
        self._function, self._who = function, who
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="alongside", daemon=True)
        self._thread.start()

    def result(self, timeout_s: float) -> None:
        """Wait for it; raises what it raised, EngineError where it takes longer."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise EngineError(f"{self._who} did not answer within {timeout_s:g} s")
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._function()
        except BaseException as error:
            self._error = error


logger = logging.getLogger(__name__)


class DirectLoader(WeightLoader):
    """workers: of the engine; timeout_s: of a load; on_device: the only one stages versions on its device;
    verify_every: versions from one look at the weights in use to the next, 0 for none."""

    def __init__(
        self, control: EngineControl, workers: int, timeout_s: float, on_device: bool = False, verify_every: int = 0
    ):
        self.workers = workers
        self._control, self._timeout_s = control, timeout_s
        self._options = {"stage_on_device": on_device, "load_timeout_s": timeout_s, "verify_every": verify_every}

    def connected(self, weights: Actor) -> None:
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
        offering = Alongside(staged.apply_on_workers, "the engine's workers")
        failure: BaseException | None = None
        try:
            self._control.order("/update_weights", {"update_info": wanted}, self._timeout_s)
        except EngineError as error:
            failure = error
        try:
            offering.result(self._timeout_s)
        except BaseException as error:
            # They refuse only what the engine's thread has not taken, and will not.
            if isinstance(error, WeightsRefused) or failure is None:
                failure = error
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
            raise WeightsRefused(f"the engine begins no update: {error}") from error
