"""The engine's thread: everything that touches the engine runs here, between two steps."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import torch

from torchtitan.inference.engines.embedded.engine import Engine, NonFiniteLogits
from torchtitan.inference.types import Completion, GenerateRequest
from torchtitan.utils.json_lines import ActivityLog

logger = logging.getLogger(__name__)

# A step of the largest model on the slowest machine ends within this time.
CALL_SECONDS = 120.0
# Between two looks whether what runs is finished.
FINISH_POLL_SECONDS = 0.02
# So much more processor time shows that the engine's thread works.
WORK_SECONDS = 0.01

Result = TypeVar("Result")


class Unavailable(Exception):
    """The engine must not or cannot serve now; later, or on another actor, the same request may do."""


class EngineEnds(Exception):
    """Raised in the engine's thread to end it; the message is why."""


class Applied(NamedTuple):
    """What a weight update cost, in seconds."""

    pause_s: float
    """Nothing was generated"""
    drain_s: float
    """Before that, only requests that had begun were"""


@dataclass
class _Update:
    """A weight update that has been ordered and waits for its turn."""

    version: int
    work: Callable[[], float]
    future: Future[Applied] = field(default_factory=Future)
    ordered_at: float = field(default_factory=time.monotonic)


class EngineLoop:
    """Drives an engine in a thread of its own while it has requests, and sleeps otherwise.

    Args:
        engine: belongs to this loop's thread from `start` on.
        threads: CPU threads of its computations; 0 leaves torch's choice.
        require_version: serve nothing until a version was applied.
        on_failure: called in the thread if it ends by an error (`failure`); nothing is served afterwards.
        drain_timeout_s: before weights change, requests that have begun get so long to finish, and new ones wait for
            the new weights; 0 changes them in flight.
        activity: notes when the engine worked.
    """

    def __init__(
        self,
        engine: Engine,
        threads: int,
        require_version: bool,
        on_failure: Callable[[], object],
        drain_timeout_s: float = 0.0,
        activity: ActivityLog | None = None,
    ):
        self.engine, self._threads, self._require_version = engine, threads, require_version
        self._on_failure, self._drain_timeout_s = on_failure, drain_timeout_s
        self._activity = activity or ActivityLog()
        self._commands: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        # Touched in the engine's thread only.
        self._waiters: dict[str, Future[list[Completion]]] = {}
        self._updates: deque[_Update] = deque()
        self._closing = False
        self._turning_since: float | None = None
        self.failure: BaseException | None = None
        self._work_seen = 0.0, 0.0
        """The thread's processor time when it was last seen to grow, and when that was"""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self, timeout: float) -> None:
        """Drop all requests (they fail with Unavailable) and end the thread, after at most one more step."""
        self._closing = True
        self._commands.put(None)
        self._thread.join(timeout)

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Run `function` in the engine's thread, between two steps."""
        future: Future[Result] = Future()
        self._commands.put((function, future))
        if self._closing or self.failure is not None:
            future.cancel()
        return future

    def do(self, function: Callable[[], Result]) -> Result:
        """`call` from another thread, waited for.

        Raises what `function` raises, Unavailable where the engine ends, TimeoutError where it did not come to it.
        """
        try:
            return self.call(function).result(CALL_SECONDS)
        except CancelledError:
            raise Unavailable("the engine is shutting down") from None
        except FutureTimeout:
            raise TimeoutError(f"the engine did not finish its step within {CALL_SECONDS:g} s") from None

    def check_available(self) -> None:
        """Raises Unavailable where a new request would not be served now."""
        if (reason := self.why_unavailable()) is not None:
            raise Unavailable(reason)

    def why_unavailable(self) -> str | None:
        """Why a new request would not be served now, if so."""
        if self.failure is not None:
            return f"the engine has failed: {self.failure!r}"
        if self._closing:
            return "the engine is shutting down"
        if self.engine.asleep:
            return "the engine is asleep"
        if self.engine.poisoned:
            reason = self.engine.poison_reason or "a weight update failed half-way"
            return f"{reason}; waiting for a whole version"
        if self._require_version and not self.engine.statistics.versions_applied:
            return "no weights version has been applied yet"
        if self.engine.paused:
            return "the engine is paused"
        return None

    @property
    def turn_age(self) -> float:
        """Seconds since the engine's thread began what it is doing (a step, an apply) or got on with it; 0 while it
        waits for work."""
        since, now = self._turning_since, time.monotonic()
        if since is None:
            return 0.0
        worked_at = self._worked_at(now) if self.engine.computes_whole else since
        return now - max(since, self.engine.progressed_at, worked_at)

    def _worked_at(self, now: float) -> float:
        """Return when the engine's thread was last seen to have had processor time."""
        try:
            used = time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident or 0))
        except (OSError, AttributeError):  # it has ended, or this system does not tell
            return self._work_seen[1]
        if used - self._work_seen[0] > WORK_SECONDS:
            self._work_seen = used, now
        return self._work_seen[1]

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Completions of a request, whose id must be unique. Cancelling it aborts the request.

        Raises InvalidRequest, Unavailable, or NonFiniteLogits.
        """
        done: Future[list[Completion]] = Future()

        def submit() -> None:
            if self._closing:
                raise Unavailable("the engine is shutting down")
            self.engine.submit(request)
            self._waiters[request.request_id] = done

        submitted = self.call(submit)

        def watch(future: Future[None]) -> None:
            error = CancelledError() if future.cancelled() else future.exception()
            if error is not None:
                _answer(done, None, error)

        submitted.add_done_callback(watch)
        try:
            return await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            if submitted.cancelled():
                raise Unavailable("the engine is shutting down") from None
            self.call(lambda: self._abort(request.request_id))
            raise

    def apply(
        self, epoch: str, version: int, tensors: Mapping[str, torch.Tensor], check: Callable[[], None] = lambda: None
    ) -> Applied:
        """Replace the weights between two steps; called from another thread, returns what that cost.

        `check` is called in the engine's thread just before. Raises whatever it or Engine.apply_weights raises,
        TimeoutError where the engine did not come to it.
        """

        def work() -> float:
            check()
            try:
                return self.engine.apply_weights(epoch, version, tensors)
            finally:
                if self.engine.poisoned:
                    # What is running was computed with weights that no longer exist; others can redo it.
                    self._fail_all(Unavailable("a weight update failed half-way"))

        update = _Update(version, work)

        def cancel_with(ordered: Future[None]) -> None:
            if ordered.cancelled():
                update.future.cancel()

        self.call(lambda: self._updates.append(update)).add_done_callback(cancel_with)
        limit = CALL_SECONDS + self._drain_timeout_s
        try:
            return update.future.result(limit)
        except CancelledError:
            raise Unavailable("the engine is shutting down") from None
        except FutureTimeout:
            if update.future.cancel():
                raise TimeoutError(f"the engine did not finish its step within {limit:g} s") from None
            return update.future.result(CALL_SECONDS)

    def sleep(self, level: int, finish_s: float) -> bool:
        """Engine.sleep, as soon as nothing runs, within `finish_s`; called from another thread. Returns whether it did.

        Raises as `do` does.
        """
        deadline = time.monotonic() + finish_s
        while True:
            slept = self.do(lambda: self.engine.sleep(level))
            if slept or time.monotonic() > deadline:
                return slept
            time.sleep(FINISH_POLL_SECONDS)

    def poison(self, epoch: str, version: int, reason: str) -> None:
        """Stop sampling at once, if these are still the weights in use. Returns when it is done."""

        def work() -> None:
            if (self.engine.epoch, self.engine.version) == (epoch, version):
                self.engine.poisoned, self.engine.poison_reason = True, reason
                self._fail_all(Unavailable(reason))

        try:
            self.do(work)
        except Unavailable as error:
            logger.debug("%s", error)
        except TimeoutError as error:
            # It still comes to it; meanwhile its age is what tells.
            logger.error("%s", error)

    def fail(self, error: Exception) -> None:
        """End the engine's thread by an error, as if it had happened there."""

        def work() -> None:
            raise EngineEnds(str(error)) from error

        self.call(work)

    def abort_all(self) -> None:
        """Drop every request; their callers get Unavailable."""
        self.do(lambda: self._fail_all(Unavailable("the request was aborted")))

    # Engine thread

    def _run(self) -> None:
        if self._threads:
            # OpenMP keeps this number per thread.
            torch.set_num_threads(self._threads)
        try:
            while not self._closing:
                self._work_off_commands()
                if self.engine.busy and not self.engine.is_stopped:
                    self._turning_since = time.monotonic()
                    begin, tokens = time.time(), self.engine.statistics.generated_tokens
                    finished = self.engine.step()
                    made = self.engine.statistics.generated_tokens - tokens
                    self._activity.stepped(begin, time.time(), self.engine.version, made)
                    for request_id, completions in finished:
                        _answer(self._waiters.pop(request_id), completions, None)
                    for request_id, reason in self.engine.take_failures().items():
                        _answer(self._waiters.pop(request_id), None, NonFiniteLogits(reason))
            self._fail_all(Unavailable("the engine is shutting down"))
        except BaseException as error:
            logger.exception("the engine failed")
            self.failure = error
            for waiter in self._waiters.values():
                _answer(waiter, None, Unavailable(f"the engine has failed: {error!r}"))
            self._on_failure()
        finally:
            self._turning_since = None
            while not self._commands.empty():
                left = self._commands.get_nowait()
                if left is not None:
                    left[1].cancel()
            for update in self._updates:
                update.future.cancel()
            self._activity.close()

    def _work_off_commands(self) -> None:
        """Run what was asked for; wait for something where there is nothing else to do."""
        while not self._closing:
            self._update_weights()
            idle = not self.engine.busy or self.engine.is_stopped
            if not idle and self._commands.empty():
                return
            self._turning_since = None
            if idle and self._commands.empty():
                self._activity.idle()
            command = self._commands.get()
            self._turning_since = time.monotonic()
            if command is None:
                return
            function, future = command
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except EngineEnds:
                raise
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def _update_weights(self) -> None:
        """Work off the updates whose turn has come. Afterwards none waits unless the engine has something to finish."""
        while self._updates and self._drained(self._updates[0]):
            update = self._updates.popleft()
            if not update.future.set_running_or_notify_cancel():
                continue
            self._turning_since = started = time.monotonic()
            drain_s = started - update.ordered_at if self._drain_timeout_s else 0.0
            now = time.time()
            try:
                pause_s = update.work()
            except Exception as error:
                update.future.set_exception(error)
                continue
            self.engine.statistics.drain_seconds += drain_s
            if drain_s:
                self._activity.updated("drain", now - drain_s, now, update.version)
            self._activity.updated("apply", now, time.time(), update.version)
            update.future.set_result(Applied(pause_s, drain_s))
        self.engine.admission_paused = bool(self._updates)

    def _drained(self, update: _Update) -> bool:
        """Whether an update need not wait any longer: nothing runs that could finish, or it had its time."""
        engine = self.engine
        finishes = engine.has_sampled and not engine.is_stopped and not update.future.cancelled()
        return not finishes or time.monotonic() - update.ordered_at >= self._drain_timeout_s

    def _abort(self, request_id: str) -> None:
        self._waiters.pop(request_id, None)
        self.engine.abort(request_id)

    def _fail_all(self, error: Exception) -> None:
        self.engine.abort_all()
        for waiter in self._waiters.values():
            _answer(waiter, None, error)
        self._waiters.clear()


def _answer(waiter: Future[Any], result: Any, error: BaseException | None) -> None:
    try:
        if error is None:
            waiter.set_result(result)
        else:
            waiter.set_exception(error)
    except InvalidStateError:
        # The caller has gone; its abort is on the way.
        logger.debug("a result came after its caller had gone")
