"""SGLang's admin routes, as an agent needs them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from torchtitan.inference.agent.control import EngineControl, EngineError, EngineFacts, PauseMode
from torchtitan.inference.client import Capabilities
from torchtitan.inference.engine_server import PREFIX_KEYS
from torchtitan.inference.types import TAGS, Tag


class SGLangControl(EngineControl):
    """SGLang tells neither whether it is paused nor what sleeps; this is what it was last told."""

    label_route = "/model_info"

    def __init__(self, url: str, token: str, timeout_s: float, in_flight_kv: Literal["keep", "recompute"]):
        super().__init__(url, token, timeout_s, in_flight_kv)
        self._paused = self._loses_weights = False
        self._workers = 1

    def describe(self) -> EngineFacts:
        data = self.ask("/server_info")
        if not (self.keeps_cache or data.get("disable_radix_cache") or self._forgets_prefixes()):
            # It is reset only while no request runs or waits: those in flight would find what they had computed.
            raise EngineError(
                "it runs with a prefix cache, which would outlive weights: start it --disable-radix-cache, or take "
                "inference.in_flight_kv = keep (--in-flight-kv)"
            )
        if self.keeps_cache and data.get("disable_overlap_schedule") is False:
            # Standing still in place, it leaves a step under way: that reads weights while they change, and its tokens
            # are counted to the new version. Requests that are retracted are waited for.
            raise EngineError(
                "it overlaps its steps, and one would outlast a pause: start it --disable-overlap-schedule, or take "
                "inference.in_flight_kv = recompute (--in-flight-kv)"
            )
        saves = bool(data.get("enable_memory_saver"))
        self._loses_weights = saves and not data.get("enable_weights_cpu_backup")
        capabilities = Capabilities(
            "sglang",
            str(data.get("version", "")),
            score=True,
            seeds=bool(data.get("enable_deterministic_inference")),
            kept_tokens=True,
            sleep=saves,
        )
        self._workers = int(data.get("tp_size", 1))
        return EngineFacts(capabilities, self._workers, can_wait=False)

    def _forgets_prefixes(self) -> bool:
        """Whether it runs with our hook (serve.py), which drops what retracted requests had computed."""
        return self.client.exchange("GET", PREFIX_KEYS, self.timeout_s)[0] == 200

    def check_health(self, timeout_s: float) -> None:
        # /health samples a token, which a paused engine does not; this question goes to its scheduler too.
        self.ask("/server_info", timeout_s)

    def pause(self, mode: PauseMode, timeout_s: float) -> bool:
        if mode == "wait":
            raise EngineError("SGLang cannot let requests finish while others wait")
        if mode == "abort":
            self._abort(timeout_s)
            return True
        self.order("/pause_generation", {"mode": "in_place" if self.keeps_cache else "retract"}, timeout_s)
        # The order is not acknowledged; the scheduler answers what was asked after it when it has obeyed.
        self.ask("/server_info", timeout_s)
        self._paused = True
        return True

    def _abort(self, timeout_s: float) -> None:
        """End all requests, and let none begin. SGLang's own mode `abort` waits without an end where it stands still
        already, so requests are aborted by themselves."""
        self.order("/pause_generation", {"mode": "retract"}, timeout_s)
        self.order("/abort_request", {"abort_all": True}, timeout_s)
        self.ask("/server_info", timeout_s)
        self._paused = True

    def resume(self) -> None:
        self.order("/continue_generation", {})
        self._paused = False

    def sleep(self, level: int, tags: Sequence[Tag], finish_s: float) -> bool:
        deadline, stood = time.monotonic() + finish_s, self._paused
        while not self._stands_idle(deadline):
            if stood or len(tags) < len(TAGS):
                return False  # it was paused from elsewhere, or it must not go on without all of its memory
            self.resume()
            if time.monotonic() > deadline:
                return False
        self.order("/release_memory_occupation", {"tags": list(tags)})
        return True

    def _stands_idle(self, deadline: float) -> bool:
        """Wait until nothing runs, and have it stand still. SGLang's scheduler ends where it is asked to give memory
        back and has a request; standing still it gets none from the server in front of it."""
        finish_s = max(0.0, deadline - time.monotonic())
        if not self._paused and not self._idle(finish_s):
            return False
        self.order("/pause_generation", {"mode": "retract"})
        self._paused = True
        return self._idle(0.0)

    def _idle(self, finish_s: float) -> bool:
        """Whether it has nothing to do, or has not any more within `finish_s`: else it does not flush its caches."""
        status, text = self.client.exchange("POST", f"/flush_cache?timeout={finish_s:.3f}", self.timeout_s + finish_s)
        if status not in (200, 400):
            raise EngineError(f"/flush_cache answered {status}: {text}")
        return status == 200

    def drops_weights(self, level: int) -> bool:
        return level == 2 or self._loses_weights

    def wake(self, tag: Tag) -> None:
        self.order("/resume_memory_occupation", {"tags": [tag]})

    def reset_prefix_cache(self) -> None:
        """It is not reset: PrefixKeyMiddleware names its parts, and serve.py drops it where running requests are
        retracted."""

    def read_files(self, folder: Path, label: str) -> None:
        # A flush that finds requests running ends SGLang's scheduler: the cache is reset by an order of its own.
        body = {"model_path": str(folder), "load_format": "safetensors", "weight_version": label, "flush_cache": False}
        self.order("/update_weights_from_disk", body)
        # Only the first worker answers. Another that finds the files gone keeps its old weights, and does not say so.
        self._wait_for_workers()

    def _wait_for_workers(self) -> None:
        """Return when all tensor-parallel workers have done what was ordered, not only the first, which answers.

        It hands each order on before it answers, by two broadcasts over gloo, where who sends waits for the receiver.
        They spread as a tree, so a worker may be as many broadcasts behind as there are levels above it.
        """
        for _ in range((self._workers - 1).bit_length()):
            self.ask("/server_info")
