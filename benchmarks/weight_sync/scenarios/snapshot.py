"""Snapshot time ÷ a plain copy of the same bytes with the same cast, in the same process.

The snapshot is reserve, snapshot and the wait for its fence, as the trainer makes them for the tensors of a small
language model; the plain copy is one foreach copy of the same tensors to ordinary memory that has been touched, in one
piece. Both use one thread and take turns, each between two targets.

    snapshot_ratio   the worse of float32 -> bfloat16 and bfloat16 -> bfloat16, median over the turns
"""

from __future__ import annotations

import itertools
import statistics

import torch

from benchmarks import common
from benchmarks.weight_sync.harness import Option, Run
from benchmarks.weight_sync.small_models import language_model_shapes
from benchmarks.weight_sync.snapshots import Snapshots

BARS = {"snapshot_ratio": ("<=", 1.15)}
OPTIONS = {
    "layers": Option(12, quick=2),
    "hidden": Option(1024, quick=256),
    "vocabulary": Option(32768, quick=4096),
    "repeats": Option(41, quick=5),
}
SOURCES = {"fp32_to_bf16": torch.float32, "bf16_to_bf16": torch.bfloat16}


class PlainCopies:
    """Copies of the parameters, in turn to one of two pieces of memory."""

    def __init__(self, parameters: list[torch.Tensor]):
        self._parameters = parameters
        counts = [parameter.numel() for parameter in parameters]
        targets = []
        for _ in range(2):
            pieces = torch.zeros(sum(counts), dtype=torch.bfloat16).split(counts)
            targets.append([piece.view(like.shape) for piece, like in zip(pieces, parameters, strict=True)])
        self._targets = itertools.cycle(targets)

    def seconds(self) -> float:
        """Of one copy."""
        target = next(self._targets)
        return common.timed(lambda: torch._foreach_copy_(target, self._parameters))


def measure(run: Run) -> dict[str, float]:
    torch.set_num_threads(1)
    options = run.options
    sizes = language_model_shapes(options.layers, options.hidden, options.vocabulary)
    figures: dict[str, float] = {"snapshot_ratio": 0.0}
    for name, source in SOURCES.items():
        parameters = {f"p{index}": torch.randn(size).to(source) for index, size in enumerate(sizes)}
        snapshots, copies = Snapshots(parameters, 2, 16 << 20), PlainCopies(list(parameters.values()))
        ways = {"snapshot": snapshots.seconds, "copy": copies.seconds}
        seconds = common.interleaved(ways, options.repeats, warm_up=3)
        snapshots.close()
        run.conditions["bytes_per_version"] = snapshots.version_bytes
        ratio = common.median_ratio(seconds["snapshot"], seconds["copy"])
        figures[f"ratio_{name}"] = ratio
        figures |= {f"{what}_ms_{name}": 1e3 * statistics.median(taken) for what, taken in seconds.items()}
        figures["snapshot_ratio"] = max(figures["snapshot_ratio"], ratio)
    run.conditions["tensors"] = len(sizes)
    return figures
