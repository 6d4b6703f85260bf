"""The direct way into vLLM: our backend inside the engine has staged the version already, and loads it in place."""

from __future__ import annotations

import logging
import threading

from torchtitan.inference.agent.control import EngineError
from torchtitan.inference.agent.loading import WeightLoader
from torchtitan.inference.vllm.control import VLLMControl
from torchtitan.weight_sync.staging import StagedVersion, WeightsRefused

logger = logging.getLogger(__name__)


class DirectLoader(WeightLoader):
    """host: address on which the engine receives weights; timeout_s: of a load;
    on_device: it stages them on its device."""

    workers = 1

    def __init__(self, control: VLLMControl, host: str, timeout_s: float, on_device: bool = False):
        self._control, self._host, self._timeout_s, self._on_device = control, host, timeout_s, on_device

    def connected(self, leader: str, actor: str, epoch: str, token: str) -> None:
        joining = {
            "leader": leader,
            "actor": actor,
            "epoch": epoch,
            "token": token,
            "host": self._host,
            "stage_on_device": self._on_device,
            "load_timeout_s": self._timeout_s,
        }
        self._control.order("/init_weight_transfer_engine", {"init_info": joining})

    # No `prepare`: the engine's receiver has staged it, and an order to the engine would wait for a step that runs.

    def load(self, staged: StagedVersion, label: str) -> None:
        self._begin()
        # The two meet in the engine: the receiver that offers the version, and the engine's thread that takes it.
        offering = _Offer(staged)
        wanted = {"epoch": staged.epoch, "version": staged.version, "digest": staged.digest}
        failure: BaseException | None = None
        try:
            self._control.order("/update_weights", {"update_info": wanted}, self._timeout_s)
        except EngineError as error:
            failure = error
        offering.join(self._timeout_s)
        # The receiver refuses only what the engine's thread has not taken, and will not.
        if isinstance(offering.error, WeightsRefused) or failure is None:
            failure = offering.error
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


class _Offer:
    """staged.apply_on_workers() on a thread of its own."""

    def __init__(self, staged: StagedVersion):
        self.error: BaseException | None = None
        self._staged = staged
        self._thread = threading.Thread(target=self._run, name="offer-weights", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for its end; `error` says why it failed."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.error = TimeoutError(f"the engine's receiver did not report within {timeout_s:g} s")

    def _run(self) -> None:
        assert self._staged.apply_on_workers is not None
        try:
            self._staged.apply_on_workers()
        except BaseException as error:
            self.error = error
