"""Weight synchronisation on a GPU: what snapshots cost, whether the fence is needed, and copies over CUDA IPC.

Needs one NVIDIA GPU. Parameters are fp32, versions bf16. Every share is taken in one run, median over interleaved
repeats:

- snapshot_share_of_copy: the smaller of two. To pinned host memory: time of one plain copy of the version's bytes over
  the bus ÷ time of a snapshot (cast included). Into device slots: time of a plain device copy that moves as many bytes
  through memory as the cast has to ÷ time of a snapshot.
- side_stream_step_ratio: a training step with every version snapshotted to the host ÷ the same step without.
- ipc_share_of_copy: another process maps the slots and copies all buckets into its staging memory; time of a plain
  copy of the same bytes in that process ÷ time of that.
- torn_without_fence: 1 when a snapshot whose copy is late (torch.cuda._sleep) is torn without the fence, never with it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import common
from benchmarks.weight_sync.harness import Option, Run
from benchmarks.weight_sync.processes import Child, say
from benchmarks.weight_sync.snapshots import Snapshots
from torchtitan.distributed import device
from torchtitan.distributed.device import Fence, SideStream
from torchtitan.weight_sync.actor.actor import StagingEngine
from torchtitan.weight_sync.memory.device_slots import DeviceSlots, device_references

BARS = {
    "snapshot_share_of_copy": (">=", 0.8),
    "side_stream_step_ratio": ("<=", 1.02),
    "ipc_share_of_copy": (">=", 0.5),
    "torn_without_fence": (">=", 1.0),
}
OPTIONS = {
    "gigabytes": Option(4.0, "of one version, in bf16", quick=0.25),
    "step": Option(0.25, "seconds of the training step that is stood in for"),
    "steps": Option(8, "in a row, with and without snapshots", quick=2),
    "repeats": Option(21, quick=3),
}
GIGABYTE = 1 << 30
BUCKET_BYTES = 256 << 20
SLEEP_CYCLES = 200_000_000


def model_parameters(version_bytes: int, where: torch.device) -> dict[str, torch.Tensor]:
    """Parameters that make a version of about so many bytes in bf16: matrices, and a small vector beside each."""
    parameters: dict[str, torch.Tensor] = {}
    columns, rows = 4096, 4096
    for index in range(max(1, version_bytes // (2 * rows * columns))):
        parameters[f"{index}.weight"] = torch.randn(rows, columns, device=where)
        parameters[f"{index}.norm"] = torch.randn(columns, device=where)
    return parameters


def snapshots_of(parameters: dict[str, torch.Tensor], on_device: bool, stream: SideStream | None = None) -> Snapshots:
    """In three slots, of the host or of the device."""
    return Snapshots(parameters, 3, BUCKET_BYTES, on_device=on_device, stream=stream)


def on_stream_seconds(work: Callable[[], object]) -> float:
    """Device seconds of `work`, between two events of the current stream."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000


def snapshot_shares(parameters: dict[str, torch.Tensor], repeats: int) -> dict[str, float]:
    """Snapshots into host memory and into device slots against plain copies."""
    where = next(iter(parameters.values())).device
    host, on_device = snapshots_of(parameters, False), snapshots_of(parameters, True)
    count = host.version_bytes
    source = torch.empty(count, dtype=torch.uint8, device=where)
    pinned = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    # fp32 read and bf16 written are 3 bytes of version read and as many written, for each 2 that it has.
    moved = torch.empty(count // 2 * 3, dtype=torch.uint8, device=where)
    moved_to = torch.empty_like(moved)

    def snapshotted(snapshots: Snapshots) -> Callable[[], float]:
        def run() -> float:
            def work() -> None:
                snapshots.start()
                snapshots.publisher.fence()

            seconds = on_stream_seconds(work)
            snapshots.finish()
            return seconds

        return run

    try:
        taken = common.interleaved(
            {
                "to host": snapshotted(host),
                "bus": lambda: on_stream_seconds(lambda: pinned.copy_(source, non_blocking=True)),
                "to device": snapshotted(on_device),
                "memory": lambda: on_stream_seconds(lambda: moved_to.copy_(moved)),
            },
            repeats,
            warm_up=3,
        )
    finally:
        host.close()
        on_device.close()
    to_host = common.median_ratio(taken["bus"], taken["to host"])
    to_device = common.median_ratio(taken["memory"], taken["to device"])
    return {
        "snapshot_share_of_copy": min(to_host, to_device),
        "host_snapshot_share_of_copy": to_host,
        "device_snapshot_share_of_copy": to_device,
        "host_snapshot_gb_per_s": count / 1e9 / statistics.median(taken["to host"]),
        "device_snapshot_gb_per_s": count / 1e9 / statistics.median(taken["to device"]),
    }


class Training:
    """A stand-in for a step: products of matrices for so long, then an optimizer over all parameters."""

    def __init__(self, parameters: dict[str, torch.Tensor], seconds: float):
        self.parameters = list(parameters.values())
        self.gradients = [torch.randn_like(parameter) for parameter in self.parameters]
        where = self.parameters[0].device
        self.left = torch.randn(8192, 8192, device=where, dtype=torch.bfloat16)
        self.right = torch.randn(8192, 8192, device=where, dtype=torch.bfloat16)
        self.product = torch.empty_like(self.left)
        self.products = 4
        for _ in range(2):  # the first time warms up
            once = on_stream_seconds(self.forward_backward)
        self.products = max(1, round(4 * seconds / once))

    def forward_backward(self) -> None:
        for _ in range(self.products):
            torch.mm(self.left, self.right, out=self.product)

    @torch.no_grad()
    def optimizer_step(self) -> None:
        torch._foreach_add_(self.parameters, self.gradients, alpha=-1e-6)


def side_stream_ratio(
    parameters: dict[str, torch.Tensor], repeats: int, steps: int, step_seconds: float
) -> dict[str, float]:
    """Steps that snapshot every version to the host against steps that do not."""
    snapshots, training = snapshots_of(parameters, False), Training(parameters, step_seconds)

    def run(publishes: bool) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            training.forward_backward()
            snapshots.publisher.fence()
            training.optimizer_step()
            if publishes:
                snapshots.start()
            # As a trainer that reads its loss: the host does not run ahead by steps.
            torch.cuda.current_stream().synchronize()
        seconds = (time.perf_counter() - start) / steps
        if publishes:
            snapshots.finish()
        return seconds

    try:
        taken = common.interleaved({"with": lambda: run(True), "without": lambda: run(False)}, repeats)
    finally:
        snapshots.close()
    return {
        "side_stream_step_ratio": common.median_ratio(taken["with"], taken["without"]),
        "step_s": statistics.median(taken["without"]),
    }


class LateStream:
    """The real side stream, on which every copy is late; drops_hold: its fences hold nothing back."""

    def __init__(self, where: torch.device, drops_hold: bool):
        self._stream, self._drops_hold = device.side_stream(where), drops_hold

    def run(self, work: Callable[[], None]) -> Fence:
        def late() -> None:
            torch.cuda._sleep(SLEEP_CYCLES)
            work()

        fence = self._stream.run(late)
        return _Unheld(fence) if self._drops_hold else fence


class _Unheld:
    def __init__(self, fence: Fence):
        self.done, self.wait = fence.done, fence.wait

    def hold(self) -> None:
        """The mutation: nothing."""


def torn_without_fence(where: torch.device, on_device: bool) -> float:
    """1 when only the fence keeps late snapshots whole."""

    def whole(drops_hold: bool) -> bool:
        parameter = torch.zeros(1 << 20, device=where)
        snapshots = snapshots_of({"p": parameter}, on_device, LateStream(where, drops_hold))
        try:
            good = True
            for version in range(1, 4):
                snapshots.publisher.fence()
                parameter.fill_(version)
                snapshots.start()
                snapshots.publisher.fence()
                parameter.fill_(-1.0)
                snapshots.finish()
                index, _ = snapshots.live.filled()[snapshots.serial]
                held = snapshots.publisher.memory[index].view(torch.bfloat16)
                good &= bool((held == version).all())
            return good
        finally:
            snapshots.close()

    return float(whole(drops_hold=False) and not whole(drops_hold=True))


def ipc_share(parameters: dict[str, torch.Tensor], repeats: int) -> dict[str, float]:
    """This process sends, another maps the slots and copies."""
    snapshots = snapshots_of(parameters, True)
    snapshots.start()
    snapshots.finish()
    index, _ = snapshots.live.filled()[snapshots.serial]
    device_slots = snapshots.publisher.slots
    assert isinstance(device_slots, DeviceSlots)
    refer, layout = device_references(device_slots), snapshots.publisher.layout
    ranges = [layout.bucket_range(0, bucket) for bucket in range(layout.bucket_count(0))]
    child = Child(
        receive,
        {
            "where": str(snapshots.publisher.memory[index].device),
            "references": [[start, end, refer(index, start, end)] for start, end in ranges],
            "bytes": snapshots.version_bytes,
            "repeats": repeats,
        },
    )
    try:
        answer = child.answer()
    finally:
        child.close()
        snapshots.close()
    expected = snapshots.publisher.memory[index].sum(dtype=torch.int64).item()
    if answer["sum"] != expected:
        raise SystemExit("the other process read other bytes than were sent")
    return {"ipc_share_of_copy": answer["share"], "ipc_gb_per_s": answer["gb_per_s"]}


def receive(arguments: dict[str, Any]) -> None:
    """In a child: the other process of ipc_share."""
    where = torch.device(arguments["where"])
    staging = torch.zeros(arguments["bytes"], dtype=torch.uint8, device=where)
    other = torch.zeros_like(staging)
    engine = StagingEngine(lambda _staged: None, str(where), lambda function: function())

    def fetched() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for start, end, reference in arguments["references"]:
            engine.copy(reference, staging[start:end])
        return time.perf_counter() - start

    def copied() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        other.copy_(staging)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    taken = common.interleaved({"ipc": fetched, "copy": copied}, arguments["repeats"], warm_up=3)
    say(
        {
            "share": common.median_ratio(taken["copy"], taken["ipc"]),
            "gb_per_s": arguments["bytes"] / 1e9 / statistics.median(taken["ipc"]),
            "sum": staging.sum(dtype=torch.int64).item(),
        }
    )


def measure(run: Run) -> dict[str, float]:
    common.refuse_without_gpu()
    options, where = run.options, device.device()
    torch.cuda.set_device(where)
    torch.manual_seed(0)
    parameters = model_parameters(int(options.gigabytes * GIGABYTE), where)
    run.conditions |= {"gpu": torch.cuda.get_device_name(where), "bucket_megabytes": BUCKET_BYTES >> 20}
    common.progress("snapshots against copies")
    figures = snapshot_shares(parameters, options.repeats)
    common.progress("training steps with and without snapshots")
    figures |= side_stream_ratio(parameters, options.repeats, options.steps, options.step)
    common.progress("copies over CUDA IPC")
    figures |= ipc_share(parameters, options.repeats)
    common.progress("without the fence")
    figures["torn_without_fence"] = min(torn_without_fence(where, on_device) for on_device in (False, True))
    return figures
