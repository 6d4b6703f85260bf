"""An actor without a model, in a process of its own: its engine only looks at what it is given.

Every applied version is a line of the log: the version that was announced, and the one that the tensors really hold.
"sparse": few elements change from one version to the next.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.integration_tests.versioned_weights import holds_sparse, version_held
from torchtitan.weight_sync.actor.actor import SyncActor
from torchtitan.weight_sync.memory.staging import StagedVersion


def run(arguments: Mapping[str, Any], until_the_end: Callable[[], None]) -> None:
    torch.set_num_threads(1)
    log = Path(arguments["log"]).open("a", buffering=1)  # noqa: SIM115 open as long as the process

    def apply(staged: StagedVersion) -> None:
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in staged.tensors.items()}
        if arguments["sparse"]:
            held = staged.version if holds_sparse(tensors, staged.version) else None
        else:
            held = version_held(tensors)
        log.write(json.dumps({"announced": staged.version, "held": held, "digest": staged.digest}) + "\n")

    names = ("registry", "name", "epoch", "key")
    actor = SyncActor(
        *[arguments[name] for name in names],
        apply,
        relay_host=arguments["relay_host"],
        where=arguments["where"],
    )
    actor.start()
    until_the_end()
    actor.close()
