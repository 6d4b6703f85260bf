"""What the benchmarks of the weight synchronisation train, and the actors without an engine that receive it.

As a script it is such an actor: a process that copies what it is given into tensors of its own, as an
engine would, and generates nothing.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import secrets
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

import torch  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks import common  # noqa: E402
from torchtitan.config.job_config import WeightSync as WeightSyncConfig  # noqa: E402
from torchtitan.utils.machine import keep_freed_memory  # noqa: E402
from torchtitan.weight_sync.actor.actor import SyncActor  # noqa: E402
from torchtitan.weight_sync.facade import WeightSync  # noqa: E402
from torchtitan.weight_sync.memory.staging import StagedVersion, to_copy  # noqa: E402
from torchtitan.weight_sync.wire.handshake import ACTOR, role_key  # noqa: E402

JOIN_SECONDS = 60.0
RECOVERY_SECONDS = 60.0


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


class Trainer:
    """Trains a residual MLP on noise with AdamW, on one thread.

    About 4 * blocks * width² parameters, and 6 floating point operations for each of them and each of `rows` rows.
    """

    def __init__(self, width: int, blocks: int, rows: int):
        torch.manual_seed(0)
        torch.set_num_threads(1)
        keep_freed_memory()
        self.model = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._input, self._target = torch.randn(rows, width), torch.randn(rows, width)
        self.parameters = dict(self.model.named_parameters())

    @property
    def elements(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())

    def forward_backward(self) -> None:
        """Gradients of one batch."""
        self._optimizer.zero_grad(set_to_none=True)
        nn.functional.mse_loss(self.model(self._input), self._target).backward()

    def update(self) -> None:
        """The optimizer step."""
        self._optimizer.step()


class Job:
    """A trainer's weight synchronisation, and what its actors need to know."""

    def __init__(
        self,
        parameters: dict[str, torch.Tensor],
        folder: Path,
        config: WeightSyncConfig | None = None,
        **options: Any,
    ):
        self.epoch, self.token = "1-benchmark", secrets.token_urlsafe(16)
        self.sync = WeightSync(
            config or WeightSyncConfig(), parameters, epoch=self.epoch, token=self.token, run_dir=folder, **options
        )
        self.version = -1

    def actor(self, name: str, cores: Sequence[int], prefix: Sequence[str] = ()) -> common.Child:
        """An actor without an engine, in a process of its own."""
        return start_actor(self.sync.registry_address, self.epoch, self.token, name, cores, prefix)

    def publish(self, no_vote: bool) -> bool:
        """After an optimizer step. False where the version was skipped."""
        self.version += 1
        return self.sync.commit(self.version, int(no_vote)) == "published"

    def applied_everywhere(self, actors: int, seconds: float = JOIN_SECONDS) -> None:
        """Wait until so many actors serve the newest version. Ends the benchmark when they do not in time."""
        outcome = self.sync.wait_until_applied(self.version, seconds, at_least=actors, counts_as_stall=False)
        if len(outcome.applied) < actors:
            raise SystemExit(
                f"version {self.version} was applied by {sorted(outcome.applied)}, not by {outcome.missing}"
            )

    def all_serve_newest(self) -> None:
        """Wait until every actor serves the newest version, so that nothing is left to be sent. Ends the benchmark when
        they do not in time."""
        deadline = time.monotonic() + RECOVERY_SECONDS
        while not all(actor.version == self.version for actor in self.sync.actors().values()):
            if time.monotonic() > deadline:
                raise SystemExit(f"the actors do not recover: {self.sync.actors()}")
            pending = self.sync.pending_version
            if pending is not None and self.sync.reserve():
                self.sync.snapshot_pending(pending)
            time.sleep(0.01)


def start_actor(
    registry: str, epoch: str, token: str, name: str, cores: Sequence[int], prefix: Sequence[str] = ()
) -> common.Child:
    """An actor without an engine, in a process of its own on `cores`."""
    arguments = {"registry": registry, "epoch": epoch, "name": name, "cores": list(cores)}
    return common.Child(Path(__file__), {**arguments, "key": role_key(token, ACTOR, name)}, prefix)


def copying_engine(threads: int) -> Callable[[StagedVersion], None]:
    """What an engine does with a version, as embedded/weights.py: it copies it into its own tensors, with so many
    threads, and puts nothing together first that came in several pieces."""
    served: dict[str, torch.Tensor] = {}
    pool = ThreadPoolExecutor(threads)

    def apply(staged: StagedVersion) -> None:
        if served.keys() != staged.tensors.keys():
            served.update({name: tensor.clone() for name, tensor in staged.tensors.items()})
            return
        tensors = dict(to_copy(staged.tensors))
        # Not torch's own threads: they wait for each other at every tensor.
        largest_first = sorted(served, key=lambda name: served[name].numel(), reverse=True)
        list(pool.map(lambda name: served[name].copy_(tensors[name]), largest_first))

    return apply


def run_actor(arguments: dict[str, Any]) -> None:
    """The actor's process."""
    common.run_on(*arguments["cores"])
    torch.set_num_threads(1)
    names = (arguments[name] for name in ("registry", "name", "epoch", "key"))
    actor = SyncActor(*names, copying_engine(len(arguments["cores"])))
    actor.start()
    sys.stdin.read()


if __name__ == "__main__":
    given = common.child_arguments()
    if given is None:
        sys.exit("this file is part of the benchmarks of the weight synchronisation, see weight_sync_stall.py")
    run_actor(given)
