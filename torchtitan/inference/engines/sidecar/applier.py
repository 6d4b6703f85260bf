"""The only code that changes a foreign engine: it pauses it, loads a version, drops the caches and resumes it, or puts
it to sleep."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch

from torchtitan.inference.engines.sidecar.foreign_engine import (
    EngineControl,
    EngineError,
    EngineOptions,
    PauseMode,
    WeightLoader,
)
from torchtitan.inference.serving.weight_verification import BaseWeights, outlines
from torchtitan.inference.types import TAGS, Tag, make_label
from torchtitan.utils.json_lines import ActivityLog
from torchtitan.weight_sync.memory.staging import StagedVersion, WeightsRefused

logger = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
# This file in each agent's folder names the process and the machine that the folder belongs to.
OWNER = "owner"
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json", ".bin.index.json")


class FileLoader(WeightLoader):
    """The agent writes a version as safetensors files, the engine reads them, and the agent removes them.

    The files are in EngineOptions.disk_path, or in memory, next to those files of the checkpoint that are not weights.
    read_files(folder, label): see EngineControl.
    """

    def __init__(self, options: EngineOptions, read_files: Callable[[Path, str], None]):
        self._model, self._read_files = Path(options.model), read_files
        parent = MEMORY if MEMORY.is_dir() else None
        if options.disk_path:
            parent = Path(options.disk_path)
            parent.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=f"torchtitan-{options.name}-", dir=parent))
        # An agent that is killed cannot remove its files, so the next one does.
        (self._folder / OWNER).write_text(f"{os.getpid()} {socket.gethostname()}")
        remove_abandoned(self._folder.parent)
        self._ready: Path | None = None

    def prepare(self, staged: StagedVersion, label: str) -> None:
        size = sum(tensor.nbytes for tensor in outlines(staged.tensors).values())
        free = shutil.disk_usage(self._folder).free
        if size > free:
            raise WeightsRefused(f"{self._folder} has {free >> 20} MiB free, the version takes {size >> 20} MiB")
        folder = self._folder / "version"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for file in self._model.iterdir():
            if file.is_file() and not file.name.endswith(WEIGHT_FILES):
                (folder / file.name).symlink_to(file.resolve())
        write_safetensors(folder / "model.safetensors", staged.tensors)
        self._ready = folder

    def load(self, staged: StagedVersion, label: str) -> None:
        folder, self._ready = self._ready, None
        if folder is None:
            raise WeightsRefused("no files were prepared")
        try:
            self._read_files(folder, label)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors (on any device) to one file, copying at most one of them at a time."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in outlines(tensors).items():
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            on_host = tensor.detach().cpu().contiguous()
            on_host.reshape(-1).view(torch.uint8).numpy().tofile(file)


def remove_abandoned(parent: Path) -> None:
    """Remove the folders of this machine's dead agents. Other machines may have folders here too."""
    for folder in parent.glob("torchtitan-*-*"):
        with contextlib.suppress(OSError, ValueError):
            process, host = (folder / OWNER).read_text().split(" ", 1)
            if host != socket.gethostname():
                continue
            try:
                os.kill(int(process), 0)
            except ProcessLookupError:
                shutil.rmtree(folder, ignore_errors=True)


class Applier:
    """What the engine holds. Only this class changes the engine's weights or pauses it.

    Args:
        control, loader: of the engine.
        timeout_s: deadline of each order to the engine.
        drain_timeout_s: time for running requests to finish before weights change; 0: weights change in flight.
        activity: records when the engine was paused.
        base: the weights that adapters are merged into; None if workers inside the engine merge them.
    """

    def __init__(
        self,
        control: EngineControl,
        loader: WeightLoader,
        timeout_s: float,
        drain_timeout_s: float = 0.0,
        activity: ActivityLog | None = None,
        base: BaseWeights | None = None,
    ):
        self._control, self._loader, self._base = control, loader, base
        self._timeout_s, self._drain_timeout_s = timeout_s, drain_timeout_s
        self._activity = activity or ActivityLog()
        self._lock = threading.Lock()
        self._connections = 0
        self.busy = False
        """A version is being applied"""
        self.draining = False
        """Running requests get time to finish; new ones wait for the version or are refused"""
        self.holds: tuple[str, int] | None = None
        """(epoch, version) that the engine serves; None: no version of ours, or a partial one"""
        self.poisoned: str | None = None
        """Why the engine may hold a partial version"""
        self.paused = False
        """A caller has asked for a pause"""
        self.asleep: set[Tag] = set()
        """Memory that the engine has given back or, after a failed order, may have given back"""
        self._cache_follows = False
        """The KV cache should be awake, and wakes as soon as there is a version to fill it with"""
        self.lost_pause: str | None = None
        """Why an order to pause was given up. The engine may still obey it; undo_lost_pause() resumes it."""

    @property
    def is_stopped(self) -> bool:
        """Whether the engine has to stay paused even after a version has come."""
        return self.paused or self.poisoned is not None or bool(self.asleep)

    def new_connection(self) -> int:
        """Return a number for a new connection to a trainer; from here on, what older ones bring is refused. Waits for
        an apply that has begun."""
        with self._lock:
            self._connections += 1
            return self._connections

    def find_lost_weights(self) -> str | None:
        """Return why the engine does not hold what it was given, if its label says so while nothing is being applied.
        From then on, nothing counts as held. Raises EngineError."""
        held = self.holds
        if held is None or self.busy or self._control.weights_label() == make_label(*held):
            return None
        if not self._lock.acquire(blocking=False):
            return None
        try:
            # Ask again under the lock, because a version may have come in between.
            label = self._control.weights_label()
            if self.holds != held or label == make_label(*held):
                return None
            self.holds = None
            return f"the engine holds {label!r} instead of version {held[1]}: it was restarted or changed"
        finally:
            self._lock.release()

    def pause(self, abort: bool) -> None:
        """Pause the engine until resume(). Raises EngineError."""
        with self._lock:
            self.paused = True
            self._stand_still("abort" if abort else "keep")

    def resume(self) -> None:
        """End pause(). An engine that is asleep or holds a partial version stays paused. Raises EngineError."""
        with self._lock:
            self.paused = False
            self._resume()

    def sleep(self, level: int, finish_s: float) -> bool:
        """Have the engine give back its memory. Returns False, and resumes it, if something still runs after
        `finish_s`.

        If this drops the weights, nothing counts as held. After an EngineError it is unknown whether the engine sleeps,
        so it stays paused until wake().
        """
        with self._lock:
            awake = [tag for tag in TAGS if tag not in self.asleep]
            if not awake:
                return True
            before = set(self.asleep)
            # From here on nothing is loaded into the engine and nothing resumes it, even if the order fails.
            self.asleep, self._cache_follows = set(TAGS), False
            sleeps = True  # an order that fails may have been obeyed all the same
            try:
                sleeps = self._control.sleep(level, awake, finish_s)
            finally:
                if sleeps and self._control.drops_weights(level):
                    self.holds = None
            if sleeps:
                return True
            self.asleep = before
            if self.is_stopped:
                self._stand_still("keep")
            self._go_on()
            return False

    def wake(self, tags: Collection[Tag]) -> None:
        """Have the engine take back parts of its memory, weights first, and resume it once all are there. An engine
        without a complete version takes its KV cache with the next one. Raises EngineError."""
        with self._lock:
            if tags and "weights" in self.asleep:
                self._wake("weights")
            if "kv_cache" in tags and "kv_cache" in self.asleep:
                self._cache_follows = self.holds is None
                if not self._cache_follows:
                    self._wake("kv_cache")

    def _wake(self, tag: Tag) -> None:
        self._control.wake(tag)
        self.asleep.discard(tag)
        if self.asleep:
            return
        self._cache_follows = False
        # The engine may have resumed by itself.
        if self.is_stopped:
            self._stand_still("keep")
        self._resume()

    def undo_lost_pause(self) -> None:
        """Resume the engine after an order to pause that was given up. Raises EngineError."""
        if self.lost_pause is None or not self._lock.acquire(blocking=False):
            return
        try:
            if self.lost_pause is not None:
                self._resume()
        finally:
            self._lock.release()

    def apply(self, connection: int, staged: StagedVersion) -> dict[str, float]:
        """Apply a version for this connection; called in a thread of its own. Returns the costs in seconds.

        Raises WeightsRefused if the engine is unchanged, for example because its weights are asleep. Any other
        exception means that it may hold a partial version; then it stays paused until a complete one has been applied.
        """
        label = make_label(staged.epoch, staged.version)
        with self._lock:
            if connection != self._connections:
                raise WeightsRefused("another connection has taken this one's place")
            if "weights" in self.asleep:
                raise WeightsRefused("the engine is asleep")
            self.busy = True
            try:
                return self._apply(staged, label)
            finally:
                self.busy = self.draining = False

    def _apply(self, staged: StagedVersion, label: str) -> dict[str, float]:
        try:
            if self._base is not None:
                staged = self._base.merged(staged)
            self._loader.prepare(staged, label)
        except Exception as error:
            raise WeightsRefused(f"could not be prepared for the engine: {error!r}") from error
        ordered, ordered_at = time.monotonic(), time.time()
        drained_by = self._stop_for_update()
        started, started_at = time.monotonic(), time.time()
        if drained_by:
            self._activity.updated("drain", ordered_at, started_at, staged.version)
        try:
            self._loader.load(staged, label)
        except WeightsRefused:
            self._go_on()
            raise
        except BaseException as error:
            self._poison(f"version {staged.version} was only partly loaded into the engine: {error}")
            raise
        try:
            self._control.reset_prefix_cache()
            if (held_label := self._control.weights_label()) != label:
                raise EngineError(f"the engine says that it holds {held_label!r}, not {label!r}")
            self.poisoned = None
            if self._cache_follows:
                self._wake("kv_cache")
            else:
                self._resume()
        except BaseException as error:
            self._poison(f"the engine did not resume with version {staged.version}: {error}")
            raise
        self.holds = (staged.epoch, staged.version)
        self._activity.updated("apply", started_at, time.time(), staged.version)
        # Without a drain, the seconds until the engine stopped count as its pause.
        drain_s = started - ordered if drained_by else 0.0
        return {"pause_s": time.monotonic() - ordered - drain_s, "drain_s": drain_s}

    def _stop_for_update(self) -> bool:
        """Pause the engine, and return whether running requests got time to finish. Raises WeightsRefused."""
        drains = self._drain_timeout_s > 0 and not self.is_stopped
        self.draining = drains
        try:
            if drains and self._stand_still("wait"):
                return True
            self._stand_still("keep")
            self.draining = False
            return drains
        except EngineError as error:
            # A slow engine may still obey the order; `lost_pause` then has undo_lost_pause() resume it.
            raise WeightsRefused(f"the engine did not pause: {error}") from error

    def _stand_still(self, mode: PauseMode) -> bool:
        try:
            return self._control.pause(mode, self._drain_timeout_s if mode == "wait" else self._timeout_s)
        except EngineError as error:
            self.lost_pause = str(error)
            raise

    def _resume(self) -> None:
        """Resume the engine unless it has to stay paused. Raises EngineError."""
        if not self.is_stopped:
            self._control.resume()
            self.lost_pause = None

    def _go_on(self) -> None:
        """Like `_resume`, but a failure is retried later."""
        try:
            self._resume()
        except EngineError as error:
            self.lost_pause = str(error)

    def _poison(self, reason: str) -> None:
        self.poisoned, self.holds = reason, None
        logger.error("poisoned: %s", reason)
        try:
            # Running requests began with weights that no longer exist; other actors can redo them.
            self._control.pause("abort", self._timeout_s)
        except EngineError as error:
            logger.warning("running requests could not be aborted: %s", error)
