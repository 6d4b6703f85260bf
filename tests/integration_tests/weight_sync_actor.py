"""An actor without a model: a real Receiver in a process of its own, whose engine only looks at what it is given.

    python -m tests.integration_tests.weight_sync_actor '{"coordinator": ..., "actor": ..., "epoch": ..., "log": ...}'

Every applied version is a line of the log: the version that was announced, and the one that the tensors really hold.
"values": "sparse" where few elements change from one version to the next.
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


def sparse_values(version: int, index: int) -> torch.Tensor:
    """As parameter_values, but one element in 32 changes with each version, and bfloat16 holds them exactly."""
    elements = torch.arange(parameter_values(0, index).numel())
    last_change = version - (version + 13 * elements + index) % 32
    return ((last_change % 96) + 128.0 * (elements % 2)).view(SHAPES[index])


def holds_sparse(tensors: dict[str, torch.Tensor], version: int) -> bool:
    """Whether all tensors hold this version of sparse_values."""
    values = [sparse_values(version, index) for index in range(len(SHAPES))]
    whole = all(torch.equal(tensors[f"p{i}"].float(), value) for i, value in enumerate(values))
    return whole and len(tensors) == len(SHAPES)


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
        if arguments.get("values") == "sparse":
            held = staged.version if holds_sparse(served, staged.version) else None
        else:
            held = version_held(served)
        line = {"announced": staged.version, "held": held, "digest": staged.digest}
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
