"""Deadlines follow from bytes: 72 billion parameters in bfloat16 are served with the default settings."""

from __future__ import annotations

import math

import pytest
import torch

from tests.deterministic.machine import Machine
from tests.unit_tests.weight_sync.job import Actor, Job, Shape
from torchtitan.config.job_config import WeightSync
from torchtitan.distributed.placement import unique_parameters

GIGABYTE = 1e9
RANKS = 8


def parameters_of_72b() -> dict[str, torch.Tensor]:
    """The shapes of Qwen2.5-72B, without memory."""
    hidden, inner, keys, vocabulary = 8192, 29568, 1024, 152064
    layer = {
        **{f"{name}_proj.weight": (size, hidden) for name, size in (("q", hidden), ("k", keys), ("v", keys))},
        **{f"{name}_proj.bias": (size,) for name, size in (("q", hidden), ("k", keys), ("v", keys))},
        "o_proj.weight": (hidden, hidden),
        **{f"{name}_proj.weight": (inner, hidden) for name in ("gate", "up")},
        "down_proj.weight": (hidden, inner),
        **dict.fromkeys(("input_norm", "post_norm"), (hidden,)),
    }
    shapes = {f"layers.{index}.{name}": shape for index in range(80) for name, shape in layer.items()}
    shapes |= {"embed": (vocabulary, hidden), "head": (vocabulary, hidden), "norm": (hidden,)}
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


class Engine(Actor):
    """Takes its time to apply."""

    apply_seconds = 0.0

    def begin(self) -> None:
        super().begin()
        self.process.longest_on_thread["apply"] = self.apply_seconds


@pytest.mark.slow
def test_version_of_72b_parameters_is_accepted_with_the_defaults() -> None:
    size = 2 * sum(math.prod(tensor.shape) for tensor in unique_parameters(parameters_of_72b()).values())
    assert 1.44e11 < size < 1.47e11
    config = WeightSync()
    shape = Shape(
        ranks=RANKS,
        # So long is no bucket under way that a deadline for its progress could mean anything else than that.
        buckets=64,
        slots=config.num_slots,
        interval=90.0,
        actor_seconds=(),
        lease_s=config.pull_deadline(size),
        progress_timeout_s=config.progress_timeout_s,
        apply_timeout_s=config.apply_deadline(size, 0.0),
    )
    machine = Machine(0)
    job = Job(machine, shape)
    # 10 and 4 Gbit/s, and engines that copy 0.6 GB per second; a rank computes its checksums at 5 GB per second.
    Engine.apply_seconds = size / (0.6 * GIGABYTE)
    for gigabits in (10, 4):
        job.actors.append(Engine(job, f"actor-{gigabits}", size / (gigabits * GIGABYTE / 8), shape.epoch))
    for rank in job.ranks:
        rank.process.longest_on_thread["checksums"] = size / RANKS / (5 * GIGABYTE)
    machine.run(1.0)
    job.train(30)
    machine.run(30 * shape.interval)
    assert not job.skipped
    lost = [record for record in job.journal if record[1] in ("evicted", "lost_snapshot", "drop", "poisoned")]
    assert not lost
    for actor in job.actors:
        # Each serves as many as its link and its engine can take one after the other.
        assert len(actor.versions) >= 30 * shape.interval / (1.5 * actor.seconds + Engine.apply_seconds) - 1
