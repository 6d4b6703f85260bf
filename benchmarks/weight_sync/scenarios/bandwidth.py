"""How fast a version gets from the trainer into an actor's tensors, over loopback.

share_of_socket               GB/s of the tcp transport ÷ GB/s of a bare socket, same bytes. The transport's time begins
                              when the actor asks for it and ends when the version is in the tensors that the actor
                              computes with, verified. The bare socket moves bytes from one process's memory into
                              another's (recv_into), and does nothing with them.
receiver_cpu_s_per_gb         processor time of the actor's process per GB of a version
busiest_thread_s_per_gb       of the thread of the actor or the shard server that needs most of it: several connections
                              divide it, and on idle cores it is what a version takes
times_faster_than_broadcast   what stock trainer sides do ÷ ours, two trainer ranks that hold half of every tensor:
                              full_tensor() and one gloo broadcast per parameter, and a copy into the actor's tensors,
                              against commit until applied; wall time of all of it

Medians over turns; no process is pinned, all may use both cores.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks import common
from benchmarks.weight_sync.bare_socket import BareSocket
from benchmarks.weight_sync.harness import Option, Run
from benchmarks.weight_sync.job import EPOCH, WAIT_SECONDS, Job, TwoSets, start_actors
from benchmarks.weight_sync.processes import Child, say
from benchmarks.weight_sync.small_models import language_model_shapes
from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.weight_sync.actor.actor import SyncActor
from torchtitan.weight_sync.facade import WeightSync
from torchtitan.weight_sync.wire.handshake import ACTOR as ACTOR_ROLE
from torchtitan.weight_sync.wire.handshake import role_key

BARS = {
    "share_of_socket": (">=", 0.88),
    "receiver_cpu_s_per_gb": ("<=", 0.33),
    "times_faster_than_broadcast": (">=", 2.5),
}
OPTIONS = {
    "layers": Option(28, quick=2),
    "hidden": Option(1024, quick=256),
    "vocabulary": Option(59392, quick=4096),
    "repeats": Option(15, quick=2),
    "connections": Option(1, "weight_sync.tcp.connections"),
}
ACTOR = "actor"
TRAINER_RANKS = 2
# Turns in which both of an actor's sets of tensors are touched for the first time.
WARM_UP = 2


class Transport:
    """A trainer in this process, its shard server and an actor."""

    def __init__(self, sizes: list[tuple[int, ...]], connections: int, folder: Path, closing: contextlib.ExitStack):
        config = WeightSyncConfig()
        config.table.connections = connections
        parameters = {f"p{index}": torch.randn(size).bfloat16() for index, size in enumerate(sizes)}
        self.job = Job(parameters, folder, config, dtype="bfloat16")
        closing.callback(self.job.close)
        cores = sorted(os.sched_getaffinity(0))
        self.actor = start_actors(self.job.place, [ACTOR], cores, shapes=sizes)
        closing.callback(self.actor.close)
        self.receiver = psutil.Process(self.actor.process.pid)
        self.cpu_s: list[float] = []
        self.thread_s: Counter[int] = Counter()
        """Thread of the actor's process or a shard server's -> its processor time in all turns behind the warm-up"""
        self.from_commit: list[float] = []
        self.parts: dict[str, list[float]] = {"transfer_s": [], "apply_s": []}

    def turn(self) -> float:
        """Seconds from the actor's request to the applied version, as the actor measured them."""
        before, threads = sum(self.receiver.cpu_times()[:2]), self.thread_seconds()
        start = self.job.publish_when_free(lambda: None)
        self.job.applied_everywhere(1)
        self.cpu_s.append(sum(self.receiver.cpu_times()[:2]) - before)
        if len(self.cpu_s) > WARM_UP:
            self.thread_s.update(self.thread_seconds() - threads)
        self.from_commit.append(time.perf_counter() - start)
        statistics_now = self.job.sync.statistics()
        for name, values in self.parts.items():
            values.append(statistics_now[f"weight_sync/{ACTOR}/{name}"])
        return self.parts["transfer_s"][-1] + self.parts["apply_s"][-1]

    def thread_seconds(self) -> Counter[int]:
        """Processor time so far of each thread of the actor's process and the shard server's."""
        children = psutil.Process().children()
        servers = [child for child in children if "shard server" in " ".join(child.cmdline())]
        seconds = Counter[int]()
        for process in (self.receiver, *servers):
            for thread in process.threads():
                seconds[thread.id] = thread.user_time + thread.system_time
        return seconds


def socket_figures(sizes: list[tuple[int, ...]], connections: int, repeats: int, folder: Path) -> dict[str, float]:
    """share_of_socket and what explains it."""
    with contextlib.ExitStack() as closing:
        transport = Transport(sizes, connections, folder, closing)
        size = sum(torch.Size(shape).numel() for shape in sizes) * 2
        bare = BareSocket(size >> 20 << 20, closing)
        seconds = common.interleaved({"transport": transport.turn, "bare": bare.turn}, repeats, warm_up=WARM_UP)
    gigabytes = size / 1e9
    return {
        "share_of_socket": common.median_ratio(seconds["bare"], seconds["transport"]),
        "transport_gb_per_s": gigabytes / statistics.median(seconds["transport"]),
        "socket_gb_per_s": gigabytes / statistics.median(seconds["bare"]),
        "receiver_cpu_s_per_gb": statistics.mean(transport.cpu_s[WARM_UP:]) / gigabytes,
        "busiest_thread_s_per_gb": max(transport.thread_s.values()) / gigabytes / repeats,
        "commit_to_applied_s": statistics.median(transport.from_commit),
        **{name: statistics.median(values) for name, values in transport.parts.items()},
    }


# Two trainer ranks and an actor


def run_rank(arguments: dict[str, Any]) -> None:
    """In a child: one of three processes of a gloo group, the trainer's ranks 0 and 1 and the actor."""
    rank, actor_rank = arguments["rank"], TRAINER_RANKS
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{arguments['folder']}/rendezvous",
        rank=rank,
        world_size=TRAINER_RANKS + 1,
        timeout=timedelta(seconds=WAIT_SECONDS),
    )
    mesh = DeviceMesh("cpu", list(range(TRAINER_RANKS)))
    to_actor = dist.new_group([0, actor_rank])
    sizes = [tuple(shape) for shape in arguments["sizes"]]
    turns: dict[str, Callable[[], None]]
    with contextlib.ExitStack() as closing:
        if rank == actor_rank:
            turns = actor_turns(sizes, to_actor, closing)
        else:
            turns = trainer_turns(sizes, rank, mesh, to_actor, Path(arguments["folder"]), closing)

        def turn(name: str) -> float:
            dist.barrier()
            start = time.perf_counter()
            turns[name]()
            dist.barrier()
            return time.perf_counter() - start

        conditions = {name: functools.partial(turn, name) for name in ("ours", "broadcast")}
        say(common.interleaved(conditions, arguments["repeats"]))
        dist.barrier()
    dist.destroy_process_group()


def trainer_turns(
    sizes: list[tuple[int, ...]],
    rank: int,
    mesh: DeviceMesh,
    to_actor: dist.ProcessGroup,
    folder: Path,
    closing: contextlib.ExitStack,
) -> dict[str, Callable[[], None]]:
    """What a trainer rank does."""
    parameters: dict[str, torch.Tensor] = {}
    for index, shape in enumerate(sizes):
        local = torch.randn(shape).bfloat16().chunk(TRAINER_RANKS)[rank].clone()
        parameters[f"p{index}"] = DTensor.from_local(local, mesh, [Shard(0)])
    address: list[Any] = [None]
    options: dict[str, Any] = {"epoch": EPOCH, "token": "token", "run_dir": folder, "dtype": "bfloat16"}
    options |= {"rank": rank, "world_size": TRAINER_RANKS}
    if rank == 0:
        sync = WeightSync(WeightSyncConfig(), parameters, **options)
        address = [sync.registry_address]
    dist.broadcast_object_list(address, src=0)
    if rank != 0:
        sync = WeightSync(WeightSyncConfig(), parameters, registry=address[0], **options)
    closing.callback(sync.close)
    version = -1

    def ours() -> None:
        nonlocal version
        version += 1
        common.wait_for(sync.reserve, WAIT_SECONDS, "a free slot")
        sync.commit(version, 0)
        sync.fence()
        if rank == 0 and not sync.wait_until_applied(version, WAIT_SECONDS, at_least=1).applied:
            raise SystemExit(f"version {version} was not applied: {sync.actors()}")

    def broadcast() -> None:
        for parameter in parameters.values():
            assert isinstance(parameter, DTensor)
            whole = parameter.full_tensor()
            if rank == 0:
                dist.broadcast(whole, src=0, group=to_actor)

    return {"ours": ours, "broadcast": broadcast}


def actor_turns(
    sizes: list[tuple[int, ...]], to_actor: dist.ProcessGroup, closing: contextlib.ExitStack
) -> dict[str, Callable[[], None]]:
    """What the actor does: it pulls by itself."""
    address: list[Any] = [None]
    dist.broadcast_object_list(address, src=0)
    key = role_key("token", ACTOR_ROLE, ACTOR)
    sets = TwoSets({f"p{index}": shape for index, shape in enumerate(sizes)}, torch.bfloat16)
    actor = SyncActor(address[0], ACTOR, EPOCH, key, sets.apply, sets=sets)
    actor.start()
    closing.callback(actor.close)
    served = [torch.zeros(shape, dtype=torch.bfloat16) for shape in sizes]

    def broadcast() -> None:
        for tensor in served:
            received = torch.empty_like(tensor)
            dist.broadcast(received, src=0, group=to_actor)
            tensor.copy_(received)

    return {"ours": lambda: None, "broadcast": broadcast}


def broadcast_figures(sizes: list[tuple[int, ...]], repeats: int, folder: Path) -> dict[str, float]:
    """times_faster_than_broadcast and what explains it."""
    folder.mkdir()
    with contextlib.ExitStack() as closing:
        ranks = []
        for rank in range(TRAINER_RANKS + 1):
            arguments = {"rank": rank, "folder": str(folder), "sizes": sizes, "repeats": repeats}
            ranks.append(Child(run_rank, arguments))
            closing.callback(ranks[-1].close)
        seconds = ranks[0].answer()
        for process in ranks:
            process.process.wait(WAIT_SECONDS)
    return {
        "times_faster_than_broadcast": common.median_ratio(seconds["broadcast"], seconds["ours"]),
        **{f"{name}_s": statistics.median(taken) for name, taken in seconds.items()},
    }


def measure(run: Run) -> dict[str, float]:
    torch.set_num_threads(1)
    options = run.options
    sizes = language_model_shapes(options.layers, options.hidden, options.vocabulary)
    run.conditions |= {
        "bytes_per_version": sum(torch.Size(shape).numel() for shape in sizes) * 2,
        "tensors": len(sizes),
        "dtype": "bfloat16",
    }
    figures = socket_figures(sizes, options.connections, options.repeats, run.folder / "socket")
    return figures | broadcast_figures(sizes, options.repeats, run.folder / "broadcast")
