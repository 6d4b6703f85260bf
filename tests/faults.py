"""Fault injection: breaks the weight synchronisation on purpose, at named phases. Off by default; logged when on.

    export TORCHTITAN_WEIGHT_SYNC_HOOK=tests.faults PYTHONPATH=.
    TORCHTITAN_WEIGHT_SYNC_FAULTS="seed=3;corrupt:version=3,times=2;kill:phase=apply,actor=actor-1,version=60-"
    TORCHTITAN_WEIGHT_SYNC_FAULTS="@/run/weight_sync/faults.txt"

A fault is `action:key=value,…`; docs/reliability.md lists actions, phases and keys. Each process counts the strikes
(`times`) of faults in the variable separately. `@file` names a file with one fault per line, which may change at any
time; strikes of these are counted across all processes, and each leaves a file in `file.struck/` that says what it hit.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.weight_sync.wire import hook

if TYPE_CHECKING:  # an engine's Python may lack it
    import pytest

VARIABLE = "TORCHTITAN_WEIGHT_SYNC_FAULTS"
logger = logging.getLogger(__name__)

_PROCESS = frozenset({"delay", "kill", "freeze"})
_LINK = _PROCESS | {"drop", "corrupt", "reset"}
_SPOKEN = _PROCESS | {"drop", "reset"}
ACTIONS = ("delay", "drop", "corrupt", "kill", "freeze", "reset", "throttle", "full_disk")


_BUCKET = {"version", "actor", "rank", "bucket"}
# Points in the protocol: the actions that are possible at each, and the keys that select when a fault strikes.
PHASES: dict[str, tuple[frozenset[str], set[str]]] = {
    "snapshot": (_PROCESS, {"version", "rank"}),
    "checksum": (_PROCESS, {"version", "rank"}),
    "publish": (_PROCESS, {"version"}),
    "pull": (_SPOKEN, {"version", "actor"}),
    "write": (_PROCESS | {"drop", "corrupt", "full_disk"}, {"version", "rank", "bucket"}),
    "send": (_LINK | {"throttle"}, _BUCKET),
    "relay": (_LINK | {"throttle"}, _BUCKET),
    "receive": (_LINK, _BUCKET),
    "staged": (_SPOKEN, {"version", "actor"}),
    "apply": (_PROCESS, {"version", "actor"}),
    "applied": (_SPOKEN, {"version", "actor"}),
}
# The phase of a fault that names none.
_USUAL_PHASE = {"drop": "send", "corrupt": "send", "reset": "send", "throttle": "send", "full_disk": "write"}
_MAX_SECONDS = 86400.0
_USUAL_KEYS = {"times", "probability"}
_OWN_KEYS = {"throttle": {"bytes_per_s"}, "delay": _USUAL_KEYS | {"seconds"}, "freeze": _USUAL_KEYS | {"seconds"}}


def _versions(text: str) -> tuple[int, float]:
    first, hyphen, last = text.partition("-")
    return int(first), float("inf") if hyphen and not last else int(last or first)


_READ: dict[str, Callable[[str], Any]] = {
    "version": _versions, "actor": str, "rank": int, "bucket": int, "times": int, "probability": float,
    "seconds": float, "bytes_per_s": int,
}  # fmt: skip


Place = tuple[str, int | None, str | None, int | None, int | None]
"""Phase, version, actor, rank and bucket, as far as the phase has them"""


class FaultError(Exception):
    """A fault that does not exist or could never strike. The message says what is allowed."""


@dataclass(frozen=True)
class Fault:
    """One fault: what goes wrong, where, and how often."""

    text: str
    action: str
    phase: str
    versions: tuple[int, float] = (0, float("inf"))
    actor: str | None = None
    rank: int | None = None
    bucket: int = 0
    """The bucket of a rank, if the phase has buckets: a single one, so that a fault strikes once per delivery"""
    times: int | None = 1
    """How often it strikes; None: without limit"""
    probability: float = 1.0
    seconds: float = 0.0
    """delay, freeze: for how long; freeze with 0: until somebody continues or kills the process"""
    bytes_per_s: int = 0
    """For throttle"""

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Parse `action:key=value,…`. Raises FaultError."""
        text = text.strip()

        def refuse(when: bool, why: object) -> None:
            if when:
                raise FaultError(f"{text!r}: {why}")

        action, _, arguments = text.partition(":")
        refuse(action not in ACTIONS, f"there is no action {action!r}, only {', '.join(ACTIONS)}")
        values: dict[str, str] = {}
        for pair in filter(None, arguments.split(",")):
            key, equals, value = (part.strip() for part in pair.partition("="))
            refuse(not equals or not value or key in values, f"{pair!r} is not a key=value that was not there before")
            values[key] = value
        phase = values.pop("phase", _USUAL_PHASE.get(action, ""))
        refuse(phase not in PHASES, f"phase must be one of {', '.join(PHASES)}")
        able = [name for name, (actions, _) in PHASES.items() if action in actions]
        refuse(phase not in able, f"{action} happens in phase {' or '.join(able)}, not in {phase}")
        # The only purpose of a name is to make the texts of otherwise equal faults differ.
        keys = {"name"} | ((PHASES[phase][1] - {"bucket"}) if action == "throttle" else PHASES[phase][1])
        keys |= _OWN_KEYS.get(action, _USUAL_KEYS)
        for key in values:
            refuse(key not in keys, f"{action} in phase {phase} takes {', '.join(sorted(keys))}, but no {key}")
        values.pop("name", None)
        try:
            given = {key: _READ[key](value) for key, value in values.items()}
        except ValueError as error:
            raise FaultError(f"{text!r}: {error}") from error
        times = given.pop("times", None if "probability" in given else 1)
        fault = cls(text, action, phase, given.pop("version", (0, float("inf"))), times=times, **given)
        possible = 0 <= fault.probability <= 1 and 0 <= fault.seconds <= _MAX_SECONDS and (times is None or times >= 1)
        refuse(not possible, f"probability must be 0 to 1, seconds 0 to {_MAX_SECONDS:g}, times at least 1")
        refuse(action == "throttle" and fault.bytes_per_s < 1, "throttle needs bytes_per_s of at least 1")
        refuse(action == "delay" and fault.seconds == 0, "delay needs seconds of more than 0")
        return fault

    def matches(self, place: Place) -> bool:
        """Return whether the fault may strike at this place."""
        phase, version, actor, rank, bucket = place
        return (
            phase == self.phase
            and (version is None or self.versions[0] <= version <= self.versions[1])
            and (self.actor is None or actor == self.actor)
            and (self.rank is None or rank == self.rank)
            and (bucket is None or bucket == self.bucket)
        )


def parse(texts: Iterable[str]) -> tuple[int, list[Fault]]:
    """Parse texts such as `seed=3` and `kill:phase=apply` to (seed, faults). Raises FaultError for an invalid one."""
    seed, faults = 0, []
    for text in filter(None, (text.strip() for text in texts)):
        if given := re.fullmatch(r"seed=(-?\d+)", text):
            seed = int(given[1])
        else:
            faults.append(Fault.parse(text))
    return seed, faults


class _Plan:
    """The faults of one value of the variable, as seen by this process."""

    def __init__(self, source: str):
        self._file = Path(source[1:]) if source.startswith("@") else None
        self._stamp: tuple[int, int, int] | None = None
        self._struck: dict[str, int] = {}
        self._met: dict[tuple[object, ...], int] = {}
        self._lock = threading.Lock()
        self._seed, self._faults = (0, []) if self._file else parse(source.split(";"))
        logger.warning("FAULT INJECTION IS ON: %s=%s", VARIABLE, source)

    def strikes(self, place: Place, throttles: bool) -> list[Fault]:
        """Return the faults that strike now at this place, and count them: only throttles, or only others. A throttle
        is counted once, and applies as long as it is listed."""
        with self._lock:
            self._look()
            return [
                fault
                for fault in self._faults
                if (fault.action == "throttle") is throttles
                and fault.matches(place)
                and self._lucky(fault, place)
                and (self._claim(fault, place) or throttles)
            ]

    def _look(self) -> None:
        if self._file is None:
            return
        try:
            status = self._file.stat()
        except FileNotFoundError:
            self._faults, self._stamp = [], None
            return
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        if stamp != self._stamp:
            self._seed, self._faults = parse(self._file.read_text().splitlines())
            self._stamp = stamp

    def _lucky(self, fault: Fault, place: Place) -> bool:
        """Decide with a seeded generator: the n-th visit of a place has the same outcome in every process and run."""
        if fault.probability >= 1:
            return True
        meeting = (fault.text, *place)
        number = self._met[meeting] = self._met.get(meeting, 0) + 1
        return random.Random(repr((self._seed, meeting, number))).random() < fault.probability

    def _claim(self, fault: Fault, place: Place) -> bool:
        """Count one strike. Returns False if the fault has struck often enough."""
        while fault.times is None or self._struck.get(fault.text, 0) < fault.times:
            number = self._struck[fault.text] = self._struck.get(fault.text, 0) + 1
            if self._file is None or self._recorded(self._file, fault, number, place):
                logger.warning("FAULT INJECTION: %s strikes at %s", fault.text, place)
                return True
        return False

    @staticmethod
    def _recorded(plan: Path, fault: Fault, number: int, place: Place) -> bool:
        """Record a strike. Returns False if another process has already recorded it."""
        folder = plan.with_name(plan.name + ".struck")
        folder.mkdir(parents=True, exist_ok=True)
        key = hashlib.blake2b(fault.text.encode(), digest_size=6).hexdigest()
        record = {"fault": fault.text, "where": place, "pid": os.getpid(), "time": time.time()}
        # A link makes the file appear complete, and fails if another process has already used its name.
        temporary = folder / f".{os.getpid()}-{threading.get_ident()}"
        temporary.write_text(json.dumps(record) + "\n")
        try:
            os.link(temporary, folder / f"{key}-{number}.json")
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        return True


_plans: dict[str, _Plan] = {}
_plans_lock = threading.Lock()


def _plan(source: str) -> _Plan:
    with _plans_lock:
        if source not in _plans:
            _plans[source] = _Plan(source)
        return _plans[source]


def variables(source: str) -> dict[str, str]:
    """Return the environment variables that turn fault injection on. source: the faults with `;` between, or @file."""
    return {hook.VARIABLE: __name__, VARIABLE: source}


def inject(patch: pytest.MonkeyPatch, source: str) -> None:
    """Turn fault injection on, for as long as the patch lasts."""
    for name, value in variables(source).items():
        patch.setenv(name, value)


def write_plan(texts: Iterable[str], file: Path) -> None:
    """Write the file of a variable `@file`, as a whole, while other processes read it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_text("\n".join(texts) + "\n")
    os.replace(temporary, file)


def _striking(throttles: bool, phase: str, where: dict[str, Any]) -> list[Fault]:
    source = os.environ.get(VARIABLE)
    if not source:
        return []
    version, actor, rank, bucket = map(where.get, ("version", "actor", "rank", "bucket"))
    return _plan(source).strikes((phase, version, actor, rank, bucket), throttles)


def at(phase: str, **where: Any) -> frozenset[str]:
    """Let faults strike: every process of the synchronisation calls this at each phase. A no-op unless faults are on.

    Delays, kills or freezes this process. Returns what the caller must do itself: "drop" and "corrupt". Raises
    ConnectionResetError for a reset, OSError (ENOSPC) for a full disk.
    """
    asked = set()
    for fault in _striking(False, phase, where):
        if fault.action == "delay":
            time.sleep(fault.seconds)
        elif fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.action == "freeze":
            _freeze(fault.seconds)
        elif fault.action == "reset":
            raise ConnectionResetError(f"fault injection: {fault.text}")
        elif fault.action == "full_disk":
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (fault injection: {fault.text})")
        elif fault.action in ("drop", "corrupt"):
            asked.add(fault.action)
    return frozenset(asked)


def bytes_per_second(phase: str = "send", **where: Any) -> int:
    """Return the rate of a throttled connection; 0: unlimited."""
    return min((fault.bytes_per_s for fault in _striking(True, phase, where)), default=0)


def damaged(data: memoryview) -> memoryview:
    """Return a copy with one flipped bit in its middle."""
    copy = bytearray(data)
    copy[len(copy) // 2] ^= 0x10
    return memoryview(copy)


def _freeze(seconds: float) -> None:
    if seconds > 0:
        # The shell exits at once and init adopts the background process, so this process keeps no child.
        command = f"(sleep {seconds}; kill -CONT {os.getpid()}) &"
        subprocess.run(["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
    os.kill(os.getpid(), signal.SIGSTOP)
