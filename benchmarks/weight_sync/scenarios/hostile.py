"""One hostile actor of each kind beside two honest ones: does the run notice?

The default task runs twice with two embedded actors: alone, and beside hostile actors. Each of those has a valid key of
its own, which the run would have given to an actor of its name, and comes back for as long as the run lasts. It sends
figures of wrong types, unknown outcomes, arbitrary messages, 20,000 pings or requests for a bucket in one go, a request
of 400,000 empty ranges, the messages and the handshake of an earlier connection again, or one message and then nothing;
it claims versions that were not published, says that it gets on with a pull of which it takes nothing, or connects
without end.

    kinds_refused          kinds of hostile actors that were refused for the reason that is expected of them
    versions_skipped       versions that the trainer did not publish
    versions_missed        published versions that an honest actor did not serve, of the one that missed most
    stall_p99_ms           of the time per step that the trainer spends on the synchronisation; _more: than without
    server_restarts        of the registry and the shard server

A run whose exit code is not 0 ends the benchmark with what the run said last.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks import common
from benchmarks.weight_sync import key_note, training_runs
from benchmarks.weight_sync.harness import Option, Run
from tests.hostile import enter, hello, message, receive
from torchtitan.report.sync_metrics import FOLDER, VERSIONS_FILE
from torchtitan.utils.json_lines import read_json_lines
from torchtitan.weight_sync.servers import MODULE
from torchtitan.weight_sync.wire import hook
from torchtitan.weight_sync.wire.handshake import ACTOR, Identity
from torchtitan.weight_sync.wire.runtime import Message, encode, parse_address

HONEST = ("actor-0", "actor-1")
FLOOD = 20_000
PAUSE_SECONDS, PUBLISH_SECONDS = 1.0, 300.0
LIES_SECONDS, RANGES = 10.0, 400_000
WRONG_FIGURES: tuple[Any, ...] = (
    "soon",
    {"bytes_full": -1},
    {"transfer_s": 1e17},
    {"transfer_s": "soon"},
    {"transfer_s": float("nan")},
    {"pause_s": 10**400},
)
BARS = {"kinds_refused": (">=", 11.0), "server_restarts": ("<=", 0.0), **training_runs.COMPARED_BARS}
OPTIONS = {"steps": Option(300, quick=25), "batch": Option(512, quick=128)}


class Hostile:
    """An actor with a key of its own, which does one kind of harm until the run is over. ports: what the run told its
    registry and its shard server."""

    def __init__(self, kind: str, ports: dict[str, dict[str, Any]], token: str):
        self.kind, self.name, self._ports = kind, f"hostile-{kind}", ports
        self._identity = Identity.of(token, ACTOR, self.name)
        self.refusals: Counter[str] = Counter()
        """Why it was refused"""
        self._random, self._round = random.Random(kind), itertools.count()
        self._sent = b""
        self._connections = contextlib.ExitStack()

    def live(self, run: subprocess.Popen[bytes]) -> None:
        while run.poll() is None:
            with contextlib.suppress(OSError, ValueError, KeyError), self._connections:
                KINDS[self.kind][0](self)
            time.sleep(PAUSE_SECONDS)

    def _dial(self, part: str = "registry") -> socket.socket:
        address = parse_address(self._ports[part]["address"])
        return self._connections.enter_context(socket.create_connection(address, timeout=10.0))

    def _about(self, part: str = "registry") -> Message:
        return {"epoch": self._ports[part]["epoch"], "instance": "i", "rank": 0}

    def _enter(self, part: str = "registry") -> socket.socket:
        """A connection past its handshake. Raises ConnectionError where it is refused."""
        client = self._dial(part)
        self._check(enter(client, self._identity, self._about(part)))
        return client

    def _check(self, answer: Message) -> None:
        if answer["type"] == "refuse":
            self.refusals[answer["reason"]] += 1
            raise ConnectionError(answer["reason"])

    def _newest(self, client: socket.socket) -> Message:
        """What the registry tells an actor of the newest version; its serial is `newest`."""
        while (answer := receive(client))["type"] != "newest":
            pass
        return answer

    def _takes(self, newest: Message) -> list[bytes]:
        """What an actor says while it takes this version, and a ping."""
        about = {"serial": newest["newest"], "version": newest["version"], "digest": newest["digest"]}
        about |= {"outcome": "staged", "reason": "", "figures": {"transfer_s": 0.001}}
        return [encode({"type": kind, **about}) for kind in ("pulling", "ended", "serving", "ping")]

    def _say_last(self, client: socket.socket, *messages: Message | bytes) -> None:
        """Say this, and then nothing until the connection is closed."""
        for message_or_bytes in messages:
            client.sendall(message_or_bytes if isinstance(message_or_bytes, bytes) else encode(message_or_bytes))
        while client.recv(1 << 20):
            pass

    # Kinds

    def figures(self) -> None:
        wrong = WRONG_FIGURES[next(self._round) % len(WRONG_FIGURES)]
        self._say_last(self._enter(), {"type": "serving", "version": 0, "digest": "", "figures": wrong})

    def outcomes(self) -> None:
        self._say_last(self._enter(), {"type": "ended", "version": 0, "outcome": "whatever", "reason": ""})

    def talks(self) -> None:
        newest = self._newest(client := self._enter())
        about = newest["version"], newest["digest"], [newest["newest"]]
        self._say_last(client, *(message(self._random, *about) for _ in range(100)))

    def pings(self) -> None:
        while True:
            self._enter().sendall(encode({"type": "ping"}) * FLOOD)

    def opens(self) -> None:
        serial = self._newest(self._enter())["newest"]
        request = encode({"type": "open", "pull": 1, "serial": serial, "buckets": [[0, 1]]})
        self._enter("shard server").sendall(request * FLOOD)
        while True:
            self._enter("shard server")

    def silent(self) -> None:
        takes = self._takes(self._newest(client := self._enter()))
        self._say_last(client, takes[next(self._round) % len(takes)])

    def replays(self) -> None:
        client, again = self._dial(), self._dial()
        recorded = encode(hello(receive(client), self._identity, self._about()))
        client.sendall(recorded)
        self._sent += b"".join(self._takes(self._newest(client)))
        client.sendall(self._sent)
        receive(again)
        again.sendall(recorded)
        self._check(receive(again))

    def claims(self) -> None:
        newest = self._newest(client := self._enter())
        version = (newest["version"] + 1, 2**62, newest["version"])[next(self._round) % 3]
        self._say_last(client, {"type": "serving", "version": version, "digest": "ff" * 16, "figures": {}})

    def holds(self) -> None:
        newest = self._newest(client := self._enter())
        until = time.monotonic() + LIES_SECONDS
        client.setblocking(False)
        while time.monotonic() < until:
            # What it is told it does not heed, but for the newest version.
            with contextlib.suppress(BlockingIOError):
                client.recv(1 << 20)
            client.sendall(encode({"type": "pulling", "serial": newest["newest"], "version": newest["version"]}))
            client.sendall(encode({"type": "ping", "bytes": time.monotonic_ns()}))
            time.sleep(0.2)
        client.settimeout(10.0)
        self._say_last(client)

    def ranges(self) -> None:
        request = encode({"type": "open", "pull": 1, "serial": 1, "buckets": [[0, 0]] * RANGES})
        while True:
            client = self._enter("shard server")
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                client.sendall(request)

    def reconnects(self) -> None:
        # Several at a time: on a busy machine, one after the other would be within what an actor may do.
        while True:
            clients = [self._dial() for _ in range(16)]
            for client in clients:
                client.sendall(encode(hello(receive(client), self._identity, self._about())))
            for client in clients:
                self._check(receive(client))
                client.close()


# Kind -> (what it does, part of the reason for which it is refused).
KINDS: dict[str, tuple[Callable[[Hostile], None], str]] = {
    "figures": (Hostile.figures, "'figures'"),
    "outcomes": (Hostile.outcomes, "'outcome': not one of staged"),
    "talks": (Hostile.talks, "protocol error"),
    "pings": (Hostile.pings, "sends too many messages"),
    "opens": (Hostile.opens, "sends too many messages"),
    "silent": (Hostile.silent, "said nothing for"),
    "replays": (Hostile.replays, "wrong key"),
    "claims": (Hostile.claims, "published"),
    "holds": (Hostile.holds, "said nothing for"),
    "ranges": (Hostile.ranges, "connects too often"),
    "reconnects": (Hostile.reconnects, "connects too often"),
}


def attack(run: subprocess.Popen[bytes], note: Path) -> list[Hostile]:
    """Hostile actors from the first version on; they end with the run. note: where the registry writes its key."""
    common.wait_for(lambda: note.exists() or run.poll() is not None, PUBLISH_SECONDS, "the first version")
    ports: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(run.pid).children(recursive=True):
            if MODULE in (words := child.cmdline()):
                place = json.loads(words[-1])
                ports[place["part"]] = place
    hostile = [Hostile(kind, ports, note.read_text()) for kind in KINDS if len(ports) == 2]
    for actor in hostile:
        threading.Thread(target=actor.live, args=(run,), name=actor.name, daemon=True).start()
    return hostile


def figures_of(latest: Path) -> dict[str, float]:
    """Of a run."""
    journal, delivered = training_runs.journal(latest), read_json_lines(latest / FOLDER / VERSIONS_FILE)
    applied = Counter(line["actor"] for line in delivered if line["outcome"] == "applied")
    published = [line["time"] for line in journal if line["event"] == "publish"]
    # In the end the servers go one after the other.
    starts = [line["event"] in ("start", "server_lost") and line["time"] < published[-1] for line in journal]
    return {
        **training_runs.figures_of(latest),
        "versions_missed": len(published) - min(applied[name] for name in HONEST),
        "server_restarts": sum(starts) - 1,
    }


def measure(run: Run) -> dict[str, float]:
    settings = training_runs.debug_settings(run.options.steps, run.options.batch, run.quick)
    common.progress("without hostile actors")
    without = figures_of(training_runs.train_beside(run.folder / "without", settings))
    common.progress("with hostile actors")
    hostile: list[Hostile] = []
    note = run.folder / "key"
    os.environ |= {hook.VARIABLE: key_note.__name__, key_note.VARIABLE: str(note)}
    latest = training_runs.train_beside(
        run.folder / "with", settings, lambda process: hostile.extend(attack(process, note))
    )
    reasons = {actor.name: actor.refusals for actor in hostile}
    for line in training_runs.journal(latest):
        if line["event"] == "evicted" and line["actor"] in reasons:
            reasons[line["actor"]][line["reason"]] += 1
    refused = 0
    for actor in hostile:
        expected = KINDS[actor.kind][1]
        found = any(expected in reason for reason in actor.refusals)
        refused += found
        often = "; ".join(f"{count} x {reason}" for reason, count in actor.refusals.most_common(4))
        run.conditions[actor.kind if found else f"{actor.kind}, NOT REFUSED"] = often
    return {"kinds_refused": refused, **training_runs.compared(figures_of(latest), without)}
