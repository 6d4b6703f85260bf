"""An actor without a model: a real Receiver in a process of its own, whose engine only looks at what it is given.

    python -m tests.integration_tests.weight_sync_actor '{"coordinator": ..., "actor": ..., "epoch": ..., "log": ...}'

Every applied version is a line of the log: the version that was announced, and the one that the tensors really hold.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from torchtitan.weight_sync.receiver import Receiver
from torchtitan.weight_sync.staging import StagedVersion
from torchtitan.weight_sync.wire import TOKEN_VARIABLE

SHAPES = ((257, 129), (1000, 150), (7,), (3, 5, 11), ())


def parameter_values(version: int, index: int) -> torch.Tensor:
    """What parameter `index` holds under `version`: exact in float32, different in every element's neighbourhood."""
    count = 1
    for size in SHAPES[index]:
        count *= size
    return ((torch.arange(count) % 61) + 64 * version + 7 * index).float().view(SHAPES[index])


def version_held(tensors: dict[str, torch.Tensor]) -> int | None:
    """The one version that all tensors hold, None for torn ones."""
    version = int(tensors["p0"].flatten()[0].item()) // 64
    whole = all(torch.equal(tensors[f"p{i}"], parameter_values(version, i)) for i in range(len(SHAPES)))
    return version if whole and len(tensors) == len(SHAPES) else None


def main() -> None:
    torch.set_num_threads(1)
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    log = Path(arguments["log"]).open("a", buffering=1)  # noqa: SIM115 open as long as the process

    def apply(staged: StagedVersion) -> None:
        served = {name: tensor.to("cpu", copy=True) for name, tensor in staged.tensors.items()}
        line = {"announced": staged.version, "held": version_held(served), "digest": staged.digest}
        log.write(json.dumps(line) + "\n")

    receiver = Receiver(
        arguments["coordinator"],
        arguments["actor"],
        arguments["epoch"],
        os.environ[TOKEN_VARIABLE],
        apply,
        where=arguments.get("where", "cpu"),
    )
    receiver.start()
    sys.stdin.read()  # until the test closes it or dies
    receiver.close()


if __name__ == "__main__":
    main()
