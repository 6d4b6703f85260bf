"""A trainer's side of the weight synchronisation, and actors that have no engine."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.weight_sync.processes import Child, say
from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.weight_sync.actor.actor import SyncActor
from torchtitan.weight_sync.facade import WeightSync
from torchtitan.weight_sync.memory.staging import SetsOfTensors, StagedTensors, StagedVersion, to_copy
from torchtitan.weight_sync.wire.handshake import ACTOR, role_key

EPOCH = "e1-benchmark"
WAIT_SECONDS = 120.0


class Job:
    """A trainer with one rank: its weight synchronisation, and what its actors need to know."""

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        folder: Path,
        config: WeightSyncConfig | None = None,
        **options: Any,
    ):
        self._token = secrets.token_urlsafe(16)
        self.sync = WeightSync(
            config or WeightSyncConfig(), dict(parameters), epoch=EPOCH, token=self._token, run_dir=folder, **options
        )
        self.version = -1
        self.place = {"registry": self.sync.registry_address, "token": self._token}
        """What an actor joins"""

    def publish(self, no_vote: bool) -> bool:
        """After an optimizer step. False where the version was skipped."""
        self.version += 1
        return self.sync.commit(self.version, int(no_vote)) == "published"

    def publish_when_free(self, change: Callable[[], object]) -> float:
        """Wait for a free slot, change the parameters and publish them; returns when that began, by
        time.perf_counter(). Ends the benchmark where it does not succeed."""
        common.wait_for(self.sync.reserve, WAIT_SECONDS, "a free slot")
        self.sync.fence()
        change()
        start = time.perf_counter()
        if not self.publish(no_vote=False):
            raise SystemExit(f"version {self.version} was not published")
        return start

    def wait_for_actors(self, count: int) -> None:
        """Until so many have joined. Ends the benchmark when they do not in time."""
        common.wait_for(lambda: len(self.sync.actors()) == count, WAIT_SECONDS, f"{count} actors join")

    def applied_everywhere(self, actors: int) -> None:
        """Wait until so many actors serve the newest version. Ends the benchmark when they do not in time."""
        outcome = self.sync.wait_until_applied(self.version, WAIT_SECONDS, at_least=actors, counts_as_stall=False)
        if len(outcome.applied) < actors:
            raise SystemExit(
                f"version {self.version} was applied by {sorted(outcome.applied)}, not by {outcome.missing}"
            )

    def all_serve_newest(self) -> None:
        """Wait until every actor serves the newest version, so that nothing is left to be sent. Ends the benchmark when
        they do not in time."""

        def served() -> bool:
            pending = self.sync.pending_version
            if pending is not None and self.sync.reserve():
                self.sync.snapshot_pending(pending)
            return all(actor.version == self.version for actor in self.sync.actors().values())

        common.wait_for(served, WAIT_SECONDS, f"version {self.version} is served by all: {self.sync.actors()}")

    def close(self) -> None:
        self.sync.close()


def start_actors(
    place: Mapping[str, str],
    names: Sequence[str],
    cores: Sequence[int] = (),
    prefix: Sequence[str] = (),
    hosts: Sequence[str] = (),
    log_folder: Path | None = None,
    shapes: Sequence[tuple[int, ...]] = (),
) -> Child:
    """Actors without an engine, in one process, which have begun to join the job at `place` when this returns.

    cores: on these, with a thread each for the copies; hosts: the address at which each relays; log_folder: each writes
    `NAME.log` there, a line with the time and the version when it begins to serve one, and copies nothing; shapes: of
    the tensors p0, p1 … in bfloat16 that each receives into, and copies nothing.
    """
    arguments = {
        "registry": place["registry"],
        "names": list(names),
        "keys": [role_key(place["token"], ACTOR, name) for name in names],
        "cores": list(cores),
        "hosts": list(hosts),
        "log_folder": str(log_folder or ""),
        "shapes": list(shapes),
    }
    child = Child(run_actors, arguments, prefix)
    child.answer()
    return child


def run_actors(arguments: dict[str, Any]) -> None:
    """The actors' process."""
    cores, hosts, log_folder = arguments["cores"], arguments["hosts"], arguments["log_folder"]
    if cores:
        common.run_on(*cores)
    torch.set_num_threads(1)
    for number, (name, key) in enumerate(zip(arguments["names"], arguments["keys"], strict=True)):
        relay: dict[str, Any] = {"relay_host": hosts[number]} if hosts else {}
        if arguments["shapes"]:
            sets = TwoSets({f"p{index}": shape for index, shape in enumerate(arguments["shapes"])}, torch.bfloat16)
            engine, relay["sets"] = sets.apply, sets
        elif log_folder:
            engine = logging_engine(Path(log_folder) / f"{name}.log")
        elif cores:
            engine = copying_engine(len(cores))
        else:
            engine = idle_engine
        SyncActor(arguments["registry"], name, EPOCH, key, engine, **relay).start()
    say({"started": len(arguments["names"])})
    sys.stdin.read()


class TwoSets:
    """An engine's two sets of tensors, as embedded/weight_sets.py: see EngineSets. tensors: name -> shape."""

    def __init__(self, tensors: Mapping[str, Sequence[int]], dtype: torch.dtype):
        self.idle, self.live = (
            {name: torch.empty(tuple(shape), dtype=dtype) for name, shape in tensors.items()} for _ in range(2)
        )
        self.outlines = {name: torch.empty_like(tensor, device="meta") for name, tensor in self.live.items()}

    def sets(self) -> SetsOfTensors:
        """See EngineSets."""
        return SetsOfTensors(self.idle, self.live)

    def apply(self, staged: StagedVersion) -> None:
        """Compute with a version that was received into the idle set. Ends the benchmark for another one."""
        tensors = staged.tensors
        if not isinstance(tensors, StagedTensors) or tensors.received_in is not self.idle:
            raise SystemExit(f"version {staged.version} was received into memory of its own")
        tensors.exchange(self._exchange)

    def _exchange(self) -> None:
        self.idle, self.live = self.live, self.idle


def idle_engine(_staged: StagedVersion) -> None:
    """Does nothing with a version."""


def logging_engine(log: Path) -> Callable[[StagedVersion], None]:
    """Writes down when it begins to serve which version."""

    def apply(staged: StagedVersion) -> None:
        with log.open("a") as lines:
            lines.write(f"{time.time()} {staged.version}\n")

    return apply


def copying_engine(threads: int) -> Callable[[StagedVersion], None]:
    """What an engine does with a version, as embedded/weights.py: it copies it into its own tensors, with so many
    threads, and puts nothing together first that came in several pieces."""
    served: dict[str, torch.Tensor] = {}
    pool = ThreadPoolExecutor(threads)

    def apply(staged: StagedVersion) -> None:
        if served.keys() != staged.tensors.keys():
            served.update({name: tensor.clone() for name, tensor in staged.tensors.items()})
            return
        tensors = dict(to_copy(staged.tensors))
        # Not torch's own threads: they wait for each other at every tensor.
        largest_first = sorted(served, key=lambda name: served[name].numel(), reverse=True)
        list(pool.map(lambda name: served[name].copy_(tensors[name]), largest_first))

    return apply
