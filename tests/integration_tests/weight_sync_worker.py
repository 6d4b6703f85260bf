"""One worker of an actor in a process of its own, without a model: it sees whole versions, or (parts) gets its half.

    python -m tests.integration_tests.weight_sync_worker '{"leader": ..., "actor": ..., "worker": ..., "epoch": ...,
        "key": ..., "log": ..., "hold": ..., "parts": ...}'

Every applied version is a line of the log. While the file `hold` exists an apply stops where a half of it is done.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.integration_tests.versioned_weights import SHAPES, parameter_values
from torchtitan.weight_sync.actor import Worker
from torchtitan.weight_sync.layout_tables import Box
from torchtitan.weight_sync.staging import StagedVersion

WORKERS = 2


def part_of(index: int, worker: int) -> Box:
    """What a worker holds of parameter `index`: its share of the last dimension; all of a scalar."""
    shape = SHAPES[index]
    if not shape:
        return Box((), ())
    length = -(-shape[-1] // WORKERS)
    start = worker * length
    return Box((0,) * (len(shape) - 1) + (start,), (*shape[:-1], min(length, shape[-1] - start)))


def part_values(version: int, index: int, worker: int) -> torch.Tensor:
    """What it holds under `version`."""
    box = part_of(index, worker)
    where = tuple(slice(low, low + size) for low, size in zip(box.offset, box.shape, strict=True))
    return parameter_values(version, index)[where]


def main() -> None:
    torch.set_num_threads(1)
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    log = Path(arguments["log"]).open("a", buffering=1)  # noqa: SIM115 open as long as the process
    number, hold = arguments["worker"], Path(arguments["hold"])

    def apply(staged: StagedVersion) -> None:
        log.write(json.dumps({"begun": staged.version}) + "\n")
        while hold.exists():
            time.sleep(0.01)
        values = partial(part_values, worker=number) if arguments["parts"] else parameter_values
        expected = {f"p{i}": values(staged.version, i) for i in range(len(SHAPES))}
        intact = staged.tensors.keys() == expected.keys() and all(
            torch.equal(staged.tensors[name], value) for name, value in expected.items()
        )
        log.write(json.dumps({"version": staged.version, "intact": intact, "digest": staged.digest}) + "\n")

    boxes = {f"p{i}": part_of(i, number) for i in range(len(SHAPES))} if arguments["parts"] else None
    names = [arguments[name] for name in ("leader", "actor", "worker", "epoch", "key")]
    worker = Worker(*names, apply, shares=boxes is None, boxes=boxes, progress_s=1.5)
    worker.start()
    sys.stdin.read()  # until the test closes it or dies
    worker.close()


if __name__ == "__main__":
    main()
