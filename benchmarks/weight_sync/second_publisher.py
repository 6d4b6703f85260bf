"""A process that publishes versions to actors of its own while another one trains: what the loads of a weight
synchronisation cost a machine, no matter which process publishes."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.weight_sync.job import Job
from benchmarks.weight_sync.processes import Child, say
from torchtitan.config.job_config import WeightSync as WeightSyncConfig


class SecondPublisher:
    """The process, seen from the benchmark that started it. It publishes tensors of the parameters' shapes."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], transport: str, core: int):
        shapes = {name: list(tensor.shape) for name, tensor in parameters.items()}
        self._child = Child(run, {"shapes": shapes, "transport": transport, "core": core})
        self.place: dict[str, str] = self._child.answer()
        """What an actor joins"""

    def first(self, actors: int) -> None:
        """Publish the first version, and wait until so many actors serve it."""
        self._ask({"first": actors})

    def publish(self) -> None:
        """The next version, beside whatever the caller does."""
        self._child.tell({"publish": True})

    def settle(self) -> int:
        """Wait until all of its actors serve the newest version; returns how many versions it has published."""
        return int(self._ask({"settle": True})["published"])

    def close(self) -> None:
        """End it."""
        self._child.close()

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self._child.tell(message)
        return self._child.answer()


def run(arguments: dict[str, Any]) -> None:
    """The process itself: it trains nothing, and publishes when it is told to."""
    common.run_on(arguments["core"])
    torch.set_num_threads(1)
    parameters = {name: 0.02 * torch.randn(shape) for name, shape in arguments["shapes"].items()}
    published = 0
    with tempfile.TemporaryDirectory() as folder:
        job = Job(parameters, Path(folder), WeightSyncConfig(transport=arguments["transport"]))
        try:
            say(job.place)
            for line in sys.stdin:
                message = json.loads(line)
                if "settle" in message:
                    job.all_serve_newest()
                    say({"published": published})
                    continue
                no_vote = not job.sync.reserve()
                job.sync.fence()
                published += job.publish(no_vote)
                if "first" in message:
                    job.applied_everywhere(message["first"])
                    say({})
        finally:
            job.close()
