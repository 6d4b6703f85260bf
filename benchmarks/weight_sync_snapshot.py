"""Snapshot time ÷ a plain copy of the same bytes with the same cast, in the same process.

    python benchmarks/weight_sync_snapshot.py --json

The snapshot is reserve, snapshot and the wait for its fence, as Publisher does them for the tensors of a small language
model; the plain copy is one foreach copy of the same tensors to ordinary memory that has been touched, in one piece.
Both use one thread and take turns, each between two targets.

    snapshot_ratio   the worse of float32 -> bfloat16 and bfloat16 -> bfloat16, median over the turns
"""

from __future__ import annotations

import os

# One thread each: the copy thread of a publisher would otherwise start threads of its own.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import statistics
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

import torch  # noqa: E402

from benchmarks import common  # noqa: E402
from torchtitan.weight_sync.memory.slots import LiveSlots  # noqa: E402
from torchtitan.weight_sync.trainer.publisher import Publisher  # noqa: E402

BARS = {"snapshot_ratio": ("<=", 1.15)}
CASTS = {"fp32_to_bf16": (torch.float32, "bfloat16"), "bf16_to_bf16": (torch.bfloat16, "bfloat16")}
BUCKET_BYTES = 16 << 20


class Side:
    """A model in one dtype, its publisher, and memory for plain copies."""

    def __init__(self, sizes: list[tuple[int, ...]], source: torch.dtype, dtype: str):
        parameters = {f"p{i}": torch.randn(size).to(source) for i, size in enumerate(sizes)}
        self.publisher = Publisher(parameters, rank=0, dtype=dtype, num_slots=2, bucket_bytes=BUCKET_BYTES)
        self._live = LiveSlots(self.publisher.slots.state_words)
        self._sources = list(parameters.values())
        counts = [parameter.numel() for parameter in self._sources]
        flat = [torch.zeros(sum(counts), dtype=getattr(torch, dtype)) for _ in range(2)]
        self._targets = [
            [piece.view(like.shape) for piece, like in zip(target.split(counts), self._sources, strict=True)]
            for target in flat
        ]
        self.serial = self._copies = 0

    @property
    def bytes(self) -> int:
        return self.publisher.layout.total_bytes

    def snapshot(self) -> float:
        """Seconds of one snapshot."""
        self.serial += 1
        begun = time.perf_counter()
        if not self.publisher.reserve():
            raise SystemExit("no slot is free")
        self.publisher.snapshot(self.serial, self.serial)
        self.publisher.fence()
        taken = time.perf_counter() - begun
        common.wait_for(lambda: self.serial in self._live.filled(), 20, "the snapshot to be ready")
        self._live.live(self.serial, (), (), 0.0)
        return taken

    def copy(self) -> float:
        """Seconds of one plain copy."""
        self._copies += 1
        return common.timed(lambda: torch._foreach_copy_(self._targets[self._copies % 2], self._sources))


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=41)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.layers, arguments.hidden, arguments.vocabulary, arguments.repeats = 2, 256, 4096, 5
    torch.set_num_threads(1)
    sizes = common.language_model_shapes(arguments.layers, arguments.hidden, arguments.vocabulary)
    figures: dict[str, float] = {"snapshot_ratio": 0.0}
    for name, (source, dtype) in CASTS.items():
        side = Side(sizes, source, dtype)
        seconds = common.interleaved({"snapshot": side.snapshot, "copy": side.copy}, arguments.repeats, warm_up=3)
        side.publisher.close()
        ratio = common.median_ratio(seconds["snapshot"], seconds["copy"])
        figures[f"ratio_{name}"] = ratio
        figures |= {f"{what}_ms_{name}": 1e3 * statistics.median(taken) for what, taken in seconds.items()}
        figures["snapshot_ratio"] = max(figures["snapshot_ratio"], ratio)
    conditions = {
        **{name: value for name, value in vars(arguments).items() if name != "json"},
        "bytes_per_version": side.bytes,
        "tensors": len(sizes),
        "threads": 1,
        "torch": torch.__version__,
    }
    common.report("weight_sync_snapshot", figures, BARS, conditions, arguments.json)


if __name__ == "__main__":
    main()
