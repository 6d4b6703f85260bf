"""Weight synchronisation under faults: one trainer that publishes every step, three actors that generate, all real.

Each transport of --transport gets its share of the faults, in one run with one trainer process. Faults: an actor, the
shard server or the registry is killed or stopped for a while, a connection is reset, a byte corrupted, a link slow, a
disk full, a file truncated. `s3` is `disk` with moto's server as the object store, which is stopped for a while, too
(needs the extra `remote` and moto[server]). A fault counts when it has struck. The seed decides what comes when; what
it meets there depends on the machine.

    training_stops         steps that spent more than --stall_s in the synchronisation, or raised: then the run is over,
                           and what it had come to is reported
    torn_or_unknown_tokens tokens not drawn from exactly one published version, or tagged with another
    leaked_slots           slots that hold something else than the newest version when all is quiet again
    leaked_descriptors     files that trainer, shard server, registry and actors hold then, and did not at the start
    memory_growth_mb       of the trainer's process, from the first tenth of the faults to the end
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks import common
from benchmarks.weight_sync.chaos_actor import SHAPES, parameter_values
from benchmarks.weight_sync.harness import Option, Run
from benchmarks.weight_sync.job import EPOCH, Job
from tests import faults
from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.inference.serving.weight_digest import slot_checksums
from torchtitan.weight_sync import servers
from torchtitan.weight_sync.memory.manifest import ChecksumTable, content_digest, merge_layouts
from torchtitan.weight_sync.memory.slots import SlotState, SlotWriter
from torchtitan.weight_sync.transports.stores import Objects
from torchtitan.weight_sync.wire.handshake import ACTOR, role_key

ACTORS = ("actor-0", "actor-1", "actor-2")
STEP_SECONDS = 0.02
BUCKET_BYTES = 128 * 1024
BUCKET = "chaos"
# One version takes about 0.05 s on the wire, so that many faults hit a transfer.
LINK_BYTES_PER_S = 40_000_000
SLOW_BYTES_PER_S = 400_000
STRIKE_SECONDS = 6.0
RECOVERY_SECONDS = 90.0

BARS = {
    "training_stops": ("<=", 0),
    "torn_or_unknown_tokens": ("<=", 0),
    "leaked_slots": ("<=", 0),
    "leaked_descriptors": ("<=", 0),
    "actors_not_recovered": ("<=", 0),
    # Freed memory that the allocator keeps, and the journal of the faults.
    "memory_growth_mb": ("<=", 32),
}
# Not summed over transports.
LARGEST = ("longest_stall_s", "memory_growth_mb")

OPTIONS = {
    "faults": Option(200, quick=4),
    "seed": Option(1),
    "transport": Option("tcp,disk", "tcp, disk, s3; of two, the first has three quarters"),
    "stall_s": Option(1.0, "a machine that is busy otherwise needs more"),
    "sync": Option("{}", 'keys of [weight_sync] as JSON, such as {"tcp.relay": true}'),
}
# Kind of fault -> how often, relative to the others.
KINDS = {
    "tcp": {
        "kill actor": 4, "stop actor": 5, "reset": 4, "corrupt": 4, "slow link": 3, "delay": 1,
        "kill server": 2, "kill registry": 2, "stop server": 1, "stop registry": 1,
    },
    "disk": {
        "full disk": 5, "corrupt": 3, "truncated file": 3, "kill actor": 2, "stop actor": 3, "reset": 2,
        "kill server": 1, "kill registry": 1,
    },
}  # fmt: skip
KINDS["s3"] = {**KINDS["disk"], "stop store": 3}
_ACTOR_PHASES = ("pull", "receive", "staged", "apply", "applied")


class TrainingStopped(Exception):
    """The synchronisation raised in the trainer."""


class Training:
    """One trainer with its shard server and registry, three actors, and the faults of one transport."""

    def __init__(self, folder: Path, transport: str, seed: int, options: dict[str, Any], stall_s: float):
        self.folder, self.transport = folder, transport
        self.random = random.Random(f"{seed} {transport}")
        self.plan = folder / "faults.txt"
        self.always = [f"throttle:bytes_per_s={LINK_BYTES_PER_S},name=always"] if transport == "tcp" else []
        self._plan_faults([])
        self.parameters = {f"p{index}": parameter_values(0, index) for index in range(len(SHAPES))}
        config = WeightSyncConfig(transport="disk" if transport == "s3" else transport)
        config.bucket_bytes, config.apply_timeout_s = BUCKET_BYTES, 2.0
        config.progress_timeout_s, servers.MAX_RESTARTS = 1.5, 1000
        for key, value in options.items():
            table, _, name = key.rpartition(".")
            setattr(getattr(config, table) if table else config, name, value)
        self._job = Job(self.parameters, folder, config)
        self.sync = self._job.sync
        # With delta, one more is kept as the base of the next.
        self.slots_in_use = 1 + config.table.delta
        self.relays = bool(config.table.relay)
        # With relay, who has connected to whom depends on who came first: an actor dials and is dialled by each other.
        self.spare_descriptors = 2 * (len(ACTORS) - 1) if self.relays else 0
        self.version = -1
        self.stops, self.stall_s = 0, stall_s
        self.longest_stall = 0.0
        self.struck: Counter[str] = Counter()
        self.actors: dict[str, subprocess.Popen[bytes]] = {}

    # Training

    def step(self) -> None:
        """One optimizer step and its publication; then the parameters hold nothing that anybody may read."""
        with self._raises_count():
            start = time.perf_counter()
            no = not self.sync.reserve()
            stall = time.perf_counter() - start
            self.version += 1
            self._fill(self.version)
            start = time.perf_counter()
            self.sync.commit(self.version, int(no))
            self.sync.fence()
            stall += time.perf_counter() - start
        self.longest_stall = max(self.longest_stall, stall)
        self.stops += stall > self.stall_s
        self._forget()
        time.sleep(STEP_SECONDS)

    @contextlib.contextmanager
    def _raises_count(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.stops += 1
            traceback.print_exc()
            raise TrainingStopped from error

    def _fill(self, version: int) -> None:
        for index, parameter in enumerate(self.parameters.values()):
            parameter.copy_(parameter_values(version, index))

    def _forget(self) -> None:
        for parameter in self.parameters.values():
            parameter.fill_(-1.0)

    def train(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Train for so long, or until something holds; returns whether it does."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.step()
            if until():
                return True
        return until()

    def settle(self) -> bool:
        """Stop publishing; the last version goes to everybody. False when it did not get there in time."""
        end = time.monotonic() + RECOVERY_SECONDS
        while time.monotonic() < end:
            # The last fault may have struck an actor that took a while to die.
            self.start_actors_that_died()
            if self.sync.pending_version is not None and self.sync.reserve():
                with self._raises_count():
                    self._fill(self.version)
                    self.sync.snapshot_pending(self.version)
                    self.sync.fence()
                    self._forget()
            if self.sync.pending_version is None and self._served_by_all(self.version) and not self.leaked_slots():
                return True
            time.sleep(0.05)
        return False

    def _served_by_all(self, version: int) -> bool:
        actors = self.sync.actors()
        return all(name in actors and actors[name].version == version and actors[name].serves for name in ACTORS)

    def leaked_slots(self) -> int:
        """Slots that hold something which nobody needs, once all actors serve the newest version."""
        writer = SlotWriter(self.sync.publisher.slots.state_words)
        count = self.sync.publisher.slots.count
        used = sum(writer.view(index).state is not SlotState.FREE for index in range(count))
        return max(0, used - self.slots_in_use)

    # Actors

    def start_actor(self, name: str) -> None:
        arguments = {
            "registry": self.sync.registry_address,
            "key": role_key(self._job.place["token"], ACTOR, name),
            "actor": name,
            "epoch": EPOCH,
            "log": str(self.folder / f"{name}.jsonl"),
            "relay_host": "127.0.0.1" if self.relays else "",
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            self.actors[name] = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.weight_sync.chaos_actor", json.dumps(arguments)],
                stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=common.REPOSITORY,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(common.REPOSITORY)},
            )  # fmt: skip

    def start_actors_that_died(self) -> None:
        for name, process in list(self.actors.items()):
            if process.poll() is not None:
                assert process.stdin is not None
                process.stdin.close()
                self.start_actor(name)

    # Faults

    def _plan_faults(self, texts: list[str]) -> None:
        faults.write_plan([*self.always, *texts], self.plan)
        os.environ.update(faults.variables(f"@{self.plan}"))

    def _strikes(self, text: str) -> int:
        folder = self.plan.with_name(self.plan.name + ".struck")
        return sum(json.loads(path.read_text())["fault"] == text for path in folder.glob("*.json"))

    def inject(self, number: int) -> bool:
        """One fault, its consequences for a moment, and its end. False when it did not strike in time."""
        names = [name for name in ACTORS if name in self.sync.actors() and self.actors[name].poll() is None]
        weights = KINDS[self.transport]
        kind = self.random.choices(list(weights), list(weights.values()))[0]
        actor = self.random.choice(names or list(ACTORS))
        self.train(self.random.random() * 0.2)
        struck = self._strike(kind, actor, number)
        self.struck[kind] += struck
        self.train(0.1 + self.random.random() * 0.3)
        self._plan_faults([])
        self.start_actors_that_died()
        return struck

    @property
    def _supervised(self) -> dict[str, Any]:
        assert self.sync.registry is not None
        return {"server": self.sync.shard_server, "registry": self.sync.registry}

    @property
    def _store(self) -> psutil.Process:
        return next(child for child in psutil.Process().children() if "moto.server" in child.cmdline())

    def _strike(self, kind: str, actor: str, number: int) -> bool:
        processes = self._supervised
        verb, _, target = kind.partition(" ")
        if verb == "kill" and target == "actor" and self.random.random() < 0.5:
            return self._planned(f"kill:phase={self.random.choice(_ACTOR_PHASES)},actor={actor}", number)
        if verb in ("kill", "stop"):
            process: Any = processes[target].process if target in processes else self.actors[actor]
            if process.poll() is not None:
                return False
            process = self._store if target == "store" else process
            process.send_signal(signal.SIGKILL if verb == "kill" else signal.SIGSTOP)
            if verb == "stop":
                self.train(0.1 + self.random.random() * (3.0 if target == "actor" else 1.0))
                process.send_signal(signal.SIGCONT)
            return True
        return self._planned(self._text(kind, actor), number)

    def _text(self, kind: str, actor: str) -> str:
        bucket = self.random.randrange(self._buckets)
        if kind == "reset":
            phase = self.random.choice(("pull", "send", "receive", "staged", "applied"))
            return f"reset:phase={phase},actor={actor}" + (f",bucket={bucket}" if phase in ("send", "receive") else "")
        if kind == "corrupt":
            if self.transport != "tcp":
                return f"corrupt:phase=write,bucket={bucket}"
            return f"corrupt:phase={self.random.choice(('send', 'receive'))},actor={actor},bucket={bucket}"
        if kind == "delay":
            return f"delay:phase={self.random.choice(_ACTOR_PHASES)},actor={actor},seconds={self.random.random():.2f}"
        return {
            "slow link": f"throttle:bytes_per_s={SLOW_BYTES_PER_S},actor={actor}",
            "full disk": f"full_disk:phase=write,bucket={bucket},times={self.random.randint(1, 3)}",
            "truncated file": f"drop:phase=write,bucket={bucket}",
        }[kind]

    @property
    def _buckets(self) -> int:
        return self.sync.publisher.layout.bucket_count(0)

    def _planned(self, text: str, number: int) -> bool:
        text += f",name=fault-{number}"
        self._plan_faults([text])
        return self.train(STRIKE_SECONDS, lambda: self._strikes(text) > 0)

    # Figures

    def descriptors(self) -> dict[str, int]:
        """Open files of every process of the run: the fewest of some readings, because a file that is just being
        written is not leaked."""
        processes = {
            "trainer": os.getpid(),
            **{name: supervised.process.pid for name, supervised in self._supervised.items()},
            **{name: process.pid for name, process in self.actors.items()},
        }
        least: dict[str, int] = {}
        for _ in range(10):
            for name, pid in processes.items():
                least[name] = min(psutil.Process(pid).num_fds(), least.get(name, sys.maxsize))
            time.sleep(0.05)
        return least

    def tokens(self) -> tuple[int, int]:
        """(all tokens, those of torn or unknown weights)."""
        count = wrong = 0
        for name in ACTORS:
            log = self.folder / f"{name}.jsonl"
            for line in map(_json_or_none, log.read_text().splitlines() if log.exists() else []):
                if line is None:
                    continue  # cut off by a kill
                count += line["tokens"]
                known = line["epoch"] == EPOCH and line["digest"] == self._digest(line["version"])
                wrong += line["torn"] if known else line["tokens"]
                if line["torn"] or not known:
                    print(f"{name} had {line}", file=sys.stderr)
        return count, wrong

    @functools.cache  # noqa: B019
    def _digest(self, version: int) -> str:
        """Of what the trainer held. A registry that is killed may not have written down what it has published."""
        layout = merge_layouts([self.sync.publisher.layout.to_json()])
        values = {f"p{index}": parameter_values(version, index) for index in range(len(SHAPES))}
        return content_digest(layout.layout_id(), [ChecksumTable.of(list(slot_checksums(layout, 0, values))).digest()])

    def close(self) -> None:
        for process in self.actors.values():
            process.kill()
            process.wait(10)
            assert process.stdin is not None
            process.stdin.close()
        self._job.close()


def _json_or_none(line: str) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:
        return None
    return record


def faults_of(
    folder: Path, transport: str, count: int, seed: int, options: dict[str, Any], stall_s: float
) -> dict[str, float]:
    """`count` faults of one transport; the figures."""
    chaos = Training(folder, transport, seed, options, stall_s)
    try:
        memory = number = done = 0
        recovered, more = False, {}
        try:
            for name in ACTORS:
                chaos.start_actor(name)
            chaos.step()
            chaos.sync.wait_until_applied(0, RECOVERY_SECONDS, at_least=len(ACTORS))
            chaos.train(1.0)
            if not chaos.settle():
                raise RuntimeError(f"the actors did not come up: {chaos.sync.actors()}, see {folder}")
            descriptors = chaos.descriptors()
            while done < count and number < 3 * count + 10:
                number += 1
                done += chaos.inject(number)
                if not memory and done * 10 >= count:
                    memory = psutil.Process().memory_info().rss
            chaos.train(1.0)
            recovered = chaos.settle()
            now, spare = chaos.descriptors(), dict.fromkeys(ACTORS, chaos.spare_descriptors)
            growths = {name: now[name] - before - spare.get(name, 0) for name, before in descriptors.items()}
            more = {name: growth for name, growth in growths.items() if growth > 0}
        except TrainingStopped:
            print(f"{transport}: the training stopped after {done} faults, see {folder}", file=sys.stderr)
        tokens, wrong = chaos.tokens()
        memory_growth = psutil.Process().memory_info().rss - memory if memory else 0
        slots = chaos.leaked_slots()
        if not recovered or wrong or slots or more or done < count:
            print(f"{transport}: {chaos.sync.actors()} slots {slots} descriptors {more} in {folder}", file=sys.stderr)
        return {
            "faults": done,
            "training_stops": chaos.stops,
            "torn_or_unknown_tokens": wrong,
            "leaked_slots": slots,
            "leaked_descriptors": sum(more.values()),
            "actors_not_recovered": sum(
                name not in chaos.sync.actors() or chaos.sync.actors()[name].version != chaos.version for name in ACTORS
            ),
            "memory_growth_mb": memory_growth / 2**20,
            "tokens": tokens,
            "steps": chaos.version + 1,
            "versions_skipped": chaos.sync.statistics()["weight_sync/versions_skipped"],
            "longest_stall_s": chaos.longest_stall,
            **{f"{transport}: {kind}": number for kind, number in sorted(chaos.struck.items())},
        }
    finally:
        chaos.close()


@contextlib.contextmanager
def s3_store() -> Iterator[None]:
    """An object store on this machine, which every process of the run finds by its environment."""
    from fsspec.config import conf, set_conf_env

    from tests.moto_server import moto_server

    with moto_server() as url:
        names = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
        os.environ |= {**names, "FSSPEC_S3_ENDPOINT_URL": url}
        set_conf_env(conf)
        Objects(f"s3://{BUCKET}")._files.mkdir(BUCKET)
        yield


def measure(run: Run) -> dict[str, float]:
    # The run is about faults that are told by pulses and deadlines; these are the same, only shorter.
    servers.HEALTHY_SECONDS = 2.0
    torch.set_num_threads(1)
    sync_options, transports, count = json.loads(run.options.sync), run.options.transport.split(","), run.options.faults
    if "s3" in transports:
        run.closing.enter_context(s3_store())
        sync_options["disk.path"] = f"s3://{BUCKET}/weights"
    shares = [count - count // 4, count // 4] if transports[1:] else [count]
    figures: dict[str, float] = {}
    for transport, share in zip(transports, shares, strict=True):
        folder = run.folder / transport
        folder.mkdir()
        of_transport = faults_of(folder, transport, share, run.options.seed, sync_options, run.options.stall_s)
        for key, value in of_transport.items():
            figures[key] = max(figures.get(key, 0), value) if key in LARGEST else figures.get(key, 0) + value
    run.bars = {"faults": (">=", count), **BARS}
    return figures
