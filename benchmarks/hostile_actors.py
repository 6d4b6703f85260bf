"""One hostile actor of each kind beside two honest ones: does the run notice?

The default task runs twice with two embedded actors: alone, and beside hostile actors. Each of those has a valid key of
its own, which the run would have given to an actor of its name, and comes back for as long as the run lasts. It sends
figures of wrong types, unknown outcomes, arbitrary messages, 20,000 pings or requests for a bucket in one go, a request
of 400,000 empty ranges, the messages and the handshake of an earlier connection again, or one message and then nothing;
it claims versions that were not published, says that it gets on with a pull of which it takes nothing, or connects
without end.

    python benchmarks/hostile_actors.py --json

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
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

import psutil  # noqa: E402

from benchmarks import common  # noqa: E402
from tests.hostile import enter, hello, message, receive  # noqa: E402
from torchtitan.report.sync_metrics import FOLDER, JOURNAL_FILE, VERSIONS_FILE  # noqa: E402
from torchtitan.utils.child_process import child_environment  # noqa: E402
from torchtitan.utils.json_lines import read_json_lines  # noqa: E402
from torchtitan.weight_sync.servers import MODULE  # noqa: E402
from torchtitan.weight_sync.wire.handshake import ACTOR, Identity  # noqa: E402
from torchtitan.weight_sync.wire.runtime import TOKEN_VARIABLE, Message, encode, parse_address  # noqa: E402

HONEST = ("actor-0", "actor-1")
FLOOD = 20_000
PAUSE_SECONDS, PORTS_SECONDS, RUN_SECONDS = 1.0, 300.0, 3600.0
LIES_SECONDS, RANGES = 10.0, 400_000
WRONG_FIGURES: tuple[Any, ...] = (
    "soon",
    {"bytes_full": -1},
    {"transfer_s": 1e17},
    {"transfer_s": "soon"},
    {"transfer_s": float("nan")},
    {"pause_s": 10**400},
)
BARS = {
    "kinds_refused": (">=", 11.0),
    "versions_skipped": ("<=", 0.0),
    "server_restarts": ("<=", 0.0),
    "pass_at_1_loss": ("<=", 0.04),
    "stall_p99_more_ms": ("<=", 5.0),
}


class Hostile:
    """An actor with a key of its own, which does one kind of harm until the run is over. ports: what the run told its
    registry and its shard server."""

    def __init__(self, kind: str, ports: dict[str, dict[str, Any]], token: str):
        self.kind, self.name, self._ports = kind, f"hostile-{kind}", ports
        self._identity = Identity.of(token, ACTOR, self.name)
        self.told: Counter[str] = Counter()
        """Why it was refused"""
        self._random, self._round = random.Random(kind), itertools.count()
        self._said = b""
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
        self._heed(enter(client, self._identity, self._about(part)))
        return client

    def _heed(self, answer: Message) -> None:
        if answer["type"] == "refuse":
            self.told[answer["reason"]] += 1
            raise ConnectionError(answer["reason"])

    def _newest(self, client: socket.socket) -> Message:
        """What the registry tells an actor of the newest version; its serial is `newest`."""
        while (told := receive(client))["type"] != "newest":
            pass
        return told

    def _takes(self, newest: Message) -> list[bytes]:
        """What an actor says while it takes this version, and a ping."""
        about = {"serial": newest["newest"], "version": newest["version"], "digest": newest["digest"]}
        about |= {"outcome": "staged", "reason": "", "figures": {"transfer_s": 0.001}}
        return [encode({"type": kind, **about}) for kind in ("pulling", "ended", "serving", "ping")]

    def _say_last(self, client: socket.socket, *said: Message | bytes) -> None:
        """Say this, and then nothing until the connection is closed."""
        client.sendall(b"".join(one if isinstance(one, bytes) else encode(one) for one in said))
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
        self._said += b"".join(self._takes(self._newest(client)))
        client.sendall(self._said)
        receive(again)
        again.sendall(recorded)
        self._heed(receive(again))

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
                self._heed(receive(client))
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


def attack(run: subprocess.Popen[bytes]) -> list[Hostile]:
    """Hostile actors from the moment at which the run has its ports; they end with it."""
    ports: dict[str, Any] = {}

    def found() -> bool:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(run.pid).children(recursive=True):
                if MODULE in (words := child.cmdline()):
                    told = json.loads(words[-1])
                    ports[told["part"]] = {**told, "token": child.environ()[TOKEN_VARIABLE]}
        return len(ports) == 2 or run.poll() is not None

    common.wait_for(found, PORTS_SECONDS, "the run's ports")
    hostile = [Hostile(kind, ports, ports["registry"]["token"]) for kind in KINDS if len(ports) == 2]
    for one in hostile:
        threading.Thread(target=one.live, args=(run,), name=one.name, daemon=True).start()
    return hostile


def measure(folder: Path, settings: dict[str, object], attacked: bool) -> tuple[dict[str, float], list[Hostile]]:
    """Figures of one run in this new folder, and the hostile actors, which know why they were refused."""
    folder.mkdir()
    settings = {**settings, "job.dump_folder": folder}
    words = [str(word) for key, value in settings.items() for word in (f"--{key}", value)]
    # Not to the terminal: the run names every actor that it loses.
    with (
        (folder / "run.log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, *common.TRAIN, *words], stdout=log, stderr=log, env=child_environment(1)
        ) as run,
    ):
        try:
            hostile = attack(run) if attacked else []
            code = run.wait(RUN_SECONDS)
        finally:
            run.terminate()
    if code:
        raise SystemExit(f"exit code {code}:\n{(folder / 'run.log').read_text(errors='replace')[-4000:]}")
    rows = read_json_lines(folder / "latest" / "metrics.jsonl")
    journal, delivered = (read_json_lines(folder / "latest" / FOLDER / name) for name in (JOURNAL_FILE, VERSIONS_FILE))
    told = {one.name: one.told for one in hostile}
    for line in journal:
        if line["event"] == "evicted" and line["actor"] in told:
            told[line["actor"]][line["reason"]] += 1
    applied = Counter(line["actor"] for line in delivered if line["outcome"] == "applied")
    published = [line["time"] for line in journal if line["event"] == "publish"]
    # In the end the servers go one after the other.
    starts = [line["event"] in ("start", "server_lost") and line["time"] < published[-1] for line in journal]
    trained = [row for row in rows if "loss" in row]
    stalls = [1e3 * row["time/sync_stall_s"] for row in trained]
    figures = {
        "steps": len(trained),
        "pass_at_1": next(row["eval/pass@1"] for row in reversed(rows) if "eval/version" in row),
        "versions_skipped": trained[-1]["weight_sync/versions_skipped"],
        "versions_missed": len(published) - min(applied[name] for name in HONEST),
        "stall_p99_ms": common.percentile(stalls, 0.99),
        "stall_max_ms": max(stalls),
        "step_p50_s": common.percentile([row["time/step_s"] for row in trained], 0.5),
        "server_restarts": sum(starts) - 1,
    }
    return figures, hostile


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--model", type=Path, help="debug checkpoint")
    arguments = parser.parse_args()
    settings: dict[str, object] = {
        "job.config_file": REPOSITORY / "train_configs" / "debug_cpu.toml",
        "model.hf_assets_path": arguments.model or common.debug_checkpoint(), "training.steps": arguments.steps,
        "training.threads": 1, "inference.num_actors": len(HONEST), "eval.interval": 0, "checkpoint.enable": "false",
    }  # fmt: skip
    if arguments.quick:
        settings |= {"training.steps": 25, "training.global_batch_size": 128, "eval.num_prompts": 8}
    with tempfile.TemporaryDirectory(prefix="hostile_actors_") as folder:
        common.progress("without hostile actors")
        without, _ = measure(Path(folder) / "without", settings, attacked=False)
        common.progress("with hostile actors")
        figures, hostile = measure(Path(folder) / "with", settings, attacked=True)
    told = {one.kind: one.told for one in hostile}
    refused = [kind for kind, (_, why) in KINDS.items() if any(why in reason for reason in told[kind])]
    figures = {"kinds_refused": len(refused), **figures, **{f"{key}_without": one for key, one in without.items()}}
    figures["pass_at_1_loss"] = without["pass_at_1"] - figures["pass_at_1"]
    figures["stall_p99_more_ms"] = figures["stall_p99_ms"] - without["stall_p99_ms"]
    conditions = {"quick": arguments.quick, "exit codes": "0 and 0", "processor": common.processor()}
    for kind, reasons in told.items():
        often = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common(4))
        conditions[kind if kind in refused else f"{kind}, NOT REFUSED"] = often
    common.report("hostile_actors", figures, {} if arguments.quick else BARS, conditions, arguments.json)


if __name__ == "__main__":
    main()
