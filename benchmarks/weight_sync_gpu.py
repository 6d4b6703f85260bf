"""Weight synchronisation on a GPU: what snapshots cost, whether the fence is needed, and copies over CUDA IPC.

    python benchmarks/weight_sync_gpu.py [--json] [--quick] [--gigabytes 4]

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
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import common
from torchtitan.distributed import device
from torchtitan.distributed.device import Fence, SideStream
from torchtitan.weight_sync.actor.actor import StagingEngine
from torchtitan.weight_sync.memory.device_slots import DeviceSlots, device_references
from torchtitan.weight_sync.memory.slots import LiveSlots
from torchtitan.weight_sync.trainer.publisher import Publisher

BARS = {
    "snapshot_share_of_copy": (">=", 0.8),
    "side_stream_step_ratio": ("<=", 1.02),
    "ipc_share_of_copy": (">=", 0.5),
    "torn_without_fence": (">=", 1.0),
}
GIGABYTE = 1 << 30
BUCKET_BYTES = 256 << 20
SLEEP_CYCLES = 200_000_000
WAIT_SECONDS = 60.0


def model_parameters(version_bytes: int, where: torch.device) -> dict[str, torch.Tensor]:
    """Parameters that make a version of about so many bytes in bf16: matrices, and a small vector beside each."""
    parameters: dict[str, torch.Tensor] = {}
    columns, rows = 4096, 4096
    for index in range(max(1, version_bytes // (2 * rows * columns))):
        parameters[f"{index}.weight"] = torch.randn(rows, columns, device=where)
        parameters[f"{index}.norm"] = torch.randn(columns, device=where)
    return parameters


class Slots:
    """A publisher, and the shard server's part of its slots: every version that is READY is published at once."""

    def __init__(self, parameters: dict[str, torch.Tensor], on_device: bool, stream: SideStream | None = None):
        self.publisher = Publisher(
            parameters,
            rank=0,
            dtype="bfloat16",
            num_slots=3,
            bucket_bytes=BUCKET_BYTES,
            on_device=on_device,
            stream=stream,
        )
        self.live = LiveSlots(self.publisher.slots.state_words)
        self.serial = 0

    @property
    def version_bytes(self) -> int:
        return self.publisher.slots.slot_bytes

    def snapshot(self) -> None:
        """Queue the next version's."""
        self._publish()
        if not self.publisher.reserve():
            # Slower than the device would be a shard server that never frees a slot.
            common.wait_for(self._freed, WAIT_SECONDS, "no slot becomes free")
        self.serial += 1
        self.publisher.snapshot(self.serial, self.serial)

    def finish(self) -> None:
        """Wait until the last one is READY."""
        common.wait_for(lambda: self.serial in self.live.filled(), WAIT_SECONDS, "a snapshot does not end")

    def _publish(self) -> None:
        filled = self.live.filled()
        if filled:
            self.live.live(max(filled), (), (), time.monotonic())

    def _freed(self) -> bool:
        self._publish()
        return self.publisher.reserve()

    def close(self) -> None:
        self.publisher.close()


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
    host, on_device = Slots(parameters, False), Slots(parameters, True)
    count = host.version_bytes
    source = torch.empty(count, dtype=torch.uint8, device=where)
    pinned = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    # fp32 read and bf16 written are 3 bytes of version read and as many written, for each 2 that it has.
    moved = torch.empty(count // 2 * 3, dtype=torch.uint8, device=where)
    moved_to = torch.empty_like(moved)

    def snapshotted(slots: Slots) -> Callable[[], float]:
        def run() -> float:
            def work() -> None:
                slots.snapshot()
                slots.publisher.fence()

            seconds = on_stream_seconds(work)
            slots.finish()
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
    slots, training = Slots(parameters, False), Training(parameters, step_seconds)

    def run(snapshots: bool) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(steps):
            training.forward_backward()
            slots.publisher.fence()
            training.optimizer_step()
            if snapshots:
                slots.snapshot()
            # As a trainer that reads its loss: the host does not run ahead by steps.
            torch.cuda.current_stream().synchronize()
        seconds = (time.perf_counter() - begun) / steps
        if snapshots:
            slots.finish()
        return seconds

    try:
        taken = common.interleaved({"with": lambda: run(True), "without": lambda: run(False)}, repeats)
    finally:
        slots.close()
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
        slots = Slots({"p": parameter}, on_device, LateStream(where, drops_hold))
        try:
            good = True
            for version in range(1, 4):
                slots.publisher.fence()
                parameter.fill_(version)
                slots.snapshot()
                slots.publisher.fence()
                parameter.fill_(-1.0)
                slots.finish()
                index, _ = slots.live.filled()[slots.serial]
                held = slots.publisher.memory[index].view(torch.bfloat16)
                good &= bool((held == version).all())
            return good
        finally:
            slots.close()

    return float(whole(drops_hold=False) and not whole(drops_hold=True))


def ipc_share(parameters: dict[str, torch.Tensor], repeats: int) -> dict[str, float]:
    """This process sends, another maps the slots and copies."""
    slots = Slots(parameters, True)
    slots.snapshot()
    slots.finish()
    index, _ = slots.live.filled()[slots.serial]
    device_slots = slots.publisher.slots
    assert isinstance(device_slots, DeviceSlots)
    refer, layout = device_references(device_slots), slots.publisher.layout
    ranges = [layout.bucket_range(0, bucket) for bucket in range(layout.bucket_count(0))]
    child = common.Child(
        Path(__file__),
        {
            "where": str(slots.publisher.memory[index].device),
            "references": [[start, end, refer(index, start, end)] for start, end in ranges],
            "bytes": slots.version_bytes,
            "repeats": repeats,
        },
    )
    try:
        answer = child.answer()
    finally:
        child.close()
        slots.close()
    expected = slots.publisher.memory[index].sum(dtype=torch.int64).item()
    if answer["sum"] != expected:
        raise SystemExit("the other process read other bytes than were sent")
    return {"ipc_share_of_copy": answer["share"], "ipc_gb_per_s": answer["gb_per_s"]}


def receive(arguments: dict[str, Any]) -> None:
    """The other process of ipc_share."""
    where = torch.device(arguments["where"])
    staging = torch.zeros(arguments["bytes"], dtype=torch.uint8, device=where)
    other = torch.zeros_like(staging)
    engine = StagingEngine(lambda _staged: None, str(where), lambda function: function())

    def fetched() -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for start, end, reference in arguments["references"]:
            engine.copy(reference, staging[start:end])
        return time.perf_counter() - begun

    def copied() -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        other.copy_(staging)
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    taken = common.interleaved({"ipc": fetched, "copy": copied}, arguments["repeats"], warm_up=3)
    common.say(
        {
            "share": common.median_ratio(taken["copy"], taken["ipc"]),
            "gb_per_s": arguments["bytes"] / 1e9 / statistics.median(taken["ipc"]),
            "sum": staging.sum(dtype=torch.int64).item(),
        }
    )


def main() -> None:
    arguments = common.child_arguments()
    if arguments is not None:
        receive(arguments)
        return
    parser = common.parser(__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of one version, in bf16")
    parser.add_argument("--step", type=float, default=0.25, help="seconds of the training step that is stood in for")
    options = parser.parse_args()
    common.refuse_without_gpu()
    repeats, steps, gigabytes = (3, 2, 0.25) if options.quick else (21, 8, options.gigabytes)
    where = device.device()
    torch.cuda.set_device(where)
    torch.manual_seed(0)
    figures: dict[str, float] = {}
    parameters = model_parameters(int(gigabytes * GIGABYTE), where)
    common.progress("snapshots against copies")
    figures |= snapshot_shares(parameters, repeats)
    common.progress("training steps with and without snapshots")
    figures |= side_stream_ratio(parameters, repeats, steps, options.step)
    common.progress("copies over CUDA IPC")
    figures |= ipc_share(parameters, repeats)
    common.progress("without the fence")
    torn = [torn_without_fence(where, on_device) for on_device in (False, True)]
    figures["torn_without_fence"] = min(torn)
    conditions = {
        "gpu": torch.cuda.get_device_name(where),
        "torch": torch.__version__,
        "version_gigabytes": gigabytes,
        "bucket_megabytes": BUCKET_BYTES >> 20,
        "repeats": repeats,
        "quick": options.quick,
    }
    common.report("weight_sync_gpu", figures, BARS, conditions, options.json)


if __name__ == "__main__":
    main()
