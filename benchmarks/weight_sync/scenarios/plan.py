"""Many parameters on many ranks: how long the plan takes, and what 64 times as many tensors cost the trainer thread.

plan_s             everything between DTensor placements and the first bucket, one after the other on one core: every
                   rank's shards, their way to the registry as JSON, the merged layout with its check that every
                   element is sent exactly once, and its way to the actor. In a job the ranks' part runs on all ranks at
                   the same time.
growth_per_version time of the trainer thread in reserve, commit and fence per version, without anything to overlap it,
                   with many tensors ÷ with few, the same bytes in both; median over versions, taken in turns
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from benchmarks import common
from benchmarks.weight_sync.harness import Option, Run
from benchmarks.weight_sync.snapshots import Snapshots
from torchtitan.weight_sync.memory.manifest import Layout, check_coverage, merge_layouts
from torchtitan.weight_sync.trainer.plan import Placed, PlacedParameter, plan_rank

BARS = {"plan_s": ("<=", 5.0), "growth_per_version": ("<=", 2.2)}
OPTIONS = {
    "parameters": Option(64512, quick=2048),
    "mesh": Option([8, 8], "trainer ranks: data and tensor parallel", count=2, type=int),
    "repeats": Option(3, "of the planning", quick=1),
    "versions": Option(15, "of each number of tensors", quick=3),
    "few": Option(1008, "tensors", quick=32),
    "bytes": Option(2 << 30, "per version", quick=16 << 20),
}
BUCKET_BYTES = 4 << 20
# A mixture-of-experts layer's tensors, and how the trainer's (data, tensor parallel) mesh cuts them.
FSDP, COLUMNS, ALIKE = Shard(0), Shard(1), Replicate()
STRIDED = _StridedShard(0, split_factor=8)
LAYER = {
    "self_attn.q_proj.weight": ((4096, 2048), (STRIDED, FSDP)),
    "self_attn.k_proj.weight": ((512, 2048), (STRIDED, FSDP)),
    "self_attn.v_proj.weight": ((512, 2048), (STRIDED, FSDP)),
    "self_attn.o_proj.weight": ((2048, 4096), (FSDP, COLUMNS)),
    "self_attn.q_norm.weight": ((128,), (FSDP, ALIKE)),
    "self_attn.k_norm.weight": ((128,), (FSDP, ALIKE)),
    "input_layernorm.weight": ((2048,), (FSDP, ALIKE)),
    "post_attention_layernorm.weight": ((2048,), (FSDP, ALIKE)),
}
EXPERT = {
    "gate_proj.weight": ((768, 2048), (STRIDED, FSDP)),
    "up_proj.weight": ((768, 2048), (STRIDED, FSDP)),
    "down_proj.weight": ((2048, 768), (FSDP, COLUMNS)),
}


def model(count: int) -> list[tuple[str, tuple[int, ...], tuple[Placement, ...]]]:
    """`count` parameters of a mixture-of-experts model with 128 experts per layer: (name, shape, placements)."""
    parameters: list[tuple[str, tuple[int, ...], tuple[Placement, ...]]] = []
    layer = 0
    while len(parameters) < count:
        tensors = {f"model.layers.{layer}.{name}": value for name, value in LAYER.items()}
        for expert in range(128):
            tensors |= {f"model.layers.{layer}.mlp.experts.{expert}.{name}": value for name, value in EXPERT.items()}
        parameters += [(name, shape, placements) for name, (shape, placements) in tensors.items()]
        layer += 1
    return parameters[:count]


def rank_view(
    parameters: list[tuple[str, tuple[int, ...], tuple]], rank: int, mesh: tuple[int, int]
) -> list[PlacedParameter]:
    """The input of one rank's plan, as parameters.placed_parameters reads it from DTensors."""
    known: dict[tuple, Placed] = {}
    coordinate = (rank // mesh[1], rank % mesh[1])
    view = []
    for name, shape, placements in parameters:
        key = (shape, placements)
        if key not in known:
            known[key] = Placed(shape, mesh, coordinate, placements)
        view.append(PlacedParameter(name, known[key]))
    return view


def plan_seconds(count: int, mesh: tuple[int, int]) -> dict[str, float]:
    """Seconds of each part of the planning."""
    parameters = model(count)
    views = [rank_view(parameters, rank, mesh) for rank in range(mesh[0] * mesh[1])]
    parts = dict.fromkeys(("ranks", "to_registry", "merge", "to_actor"), 0.0)

    def part(name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        parts[name] += time.perf_counter() - start
        return result

    reports = []
    for rank, view in enumerate(views):
        layout = part("ranks", lambda view=view, rank=rank: plan_rank(view, rank, "bfloat16", BUCKET_BYTES))
        sent = part("to_registry", lambda layout=layout: json.dumps(layout.to_json()))
        reports.append(part("to_registry", lambda sent=sent: json.loads(sent)))
    merged = part("merge", lambda: merge_layouts(reports))
    part("merge", merged.layout_id)
    sent = part("to_actor", lambda: json.dumps(merged.to_json()))
    received = part("to_actor", lambda: Layout.from_json(json.loads(sent)))
    part("to_actor", lambda: check_coverage(received))
    part("to_actor", received.layout_id)
    return parts


def snapshots_of(memory: torch.Tensor, tensors: int) -> Snapshots:
    """Of a model in so many tensors, whose slot is freed at once, as a server with fast actors would."""
    elements = memory.numel() // tensors
    parameters = {f"p{index}": piece for index, piece in enumerate(memory[: elements * tensors].split(elements))}
    return Snapshots(parameters, 1, BUCKET_BYTES)


def measure(run: Run) -> dict[str, float]:
    options = run.options
    torch.set_num_threads(1)
    planned = []
    for _ in range(options.repeats):
        planned.append(plan_seconds(options.parameters, tuple(options.mesh)))
        common.progress(f"planned in {sum(planned[-1].values()):.2f} s")
    memory = torch.ones(options.bytes // 2)
    sides = {"many": snapshots_of(memory, options.parameters), "few": snapshots_of(memory, options.few)}
    seconds = common.interleaved({name: side.seconds for name, side in sides.items()}, options.versions)
    for side in sides.values():
        side.close()
    return {
        "plan_s": statistics.median(sum(parts.values()) for parts in planned),
        "growth_per_version": common.median_ratio(seconds["many"], seconds["few"]),
        **{f"plan_{name}_s": statistics.median(parts[name] for parts in planned) for name in planned[0]},
        **{f"version_{name}_s": statistics.median(values) for name, values in seconds.items()},
    }
