"""One worker of an actor in a process of its own, without a model: it sees whole versions, of which it has
received its share, or all of them.

Every applied version is a line of the log. While the file `hold` exists an apply stops where a half of it is done.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.integration_tests.versioned_weights import SHAPES, parameter_values
from torchtitan.weight_sync.actor.actor import Worker
from torchtitan.weight_sync.memory.staging import StagedVersion

WORKERS = 2


def run(arguments: Mapping[str, Any], until_the_end: Callable[[], None]) -> None:
    torch.set_num_threads(1)
    log = Path(arguments["log"]).open("a", buffering=1)  # noqa: SIM115 open as long as the process
    hold = Path(arguments["hold"])

    def apply(staged: StagedVersion) -> None:
        log.write(json.dumps({"begun": staged.version}) + "\n")
        while hold.exists():
            time.sleep(0.01)
        expected = {f"p{i}": parameter_values(staged.version, i) for i in range(len(SHAPES))}
        intact = staged.tensors.keys() == expected.keys() and all(
            torch.equal(staged.tensors[name], value) for name, value in expected.items()
        )
        log.write(json.dumps({"version": staged.version, "intact": intact, "digest": staged.digest}) + "\n")

    names = [arguments[name] for name in ("leader", "actor", "worker", "epoch", "key")]
    worker = Worker(*names, apply, shares=arguments["shares"])
    worker.start()
    until_the_end()
    worker.close()
