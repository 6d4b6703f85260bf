"""Hands a staged version from the pulling thread to the engine's thread, and its fate back. No vLLM here."""

from __future__ import annotations

import threading
import time

from torchtitan.weight_sync.staging import StagedVersion, WeightsRefused


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

    def close(self, reason: str) -> None:
        """Nothing is handed over any more; those who wait are told why."""
        with self._changed:
            self._closed = reason
            self._changed.notify_all()
