"""Packs that compute common prefixes once, in every layout, against whole sequences on one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed_launcher import run_distributed
from tests.mixtures import make_mixture
from tests.unit_tests.distributed.test_parallel import COMPILED, EP, RECOMPUTED, TP
from tests.unit_tests.models.test_lora import fill
from tests.unit_tests.trainer.test_policy_trainer import SpiedTrainer, run_config
from tests.unit_tests.trainer.test_prefixes import make_tree
from torchtitan.distributed import device
from torchtitan.distributed.placement import full_tensor
from torchtitan.inference.types import Completion, Routes
from torchtitan.models.adapter_math import is_factor
from torchtitan.models.shape.model_args import read_model_args
from torchtitan.rollout.types import Batch

ADAPTED = {"lora.rank": 3, "lora.target_modules": ["q_proj", "v_proj", "down_proj", "lm_head"]}
REPLAYED = {"grpo.routing_replay": True}
# name -> (whether the model is a mixture, what one rank has, too, layouts of two ranks)
CASES: dict[str, tuple[bool, dict[str, Any], list[dict[str, Any]]]] = {
    "dense": (False, {}, [{}]),
    "compiled": (False, {}, [{TP: 2, **RECOMPUTED, **COMPILED}]),
    "adapters": (False, ADAPTED, [RECOMPUTED, {TP: 2}]),
    "mixture": (True, REPLAYED, [RECOMPUTED, {EP: 2}, {TP: 2}]),
}


class Collectives(TorchDispatchMode):
    """Notes every collective by its name, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def with_routes(batch: Batch, count: int, layers: int) -> Batch:
    """Two experts for every token, equal behind equal tokens, except that every seventh branch has others."""
    branches = [branch for sample in batch.samples for branch in sample.branches]
    for number, branch in enumerate(branches):
        tokens = np.array(branch.token_ids)
        first = (tokens + np.arange(len(tokens)) + (number % 7 == 6)) % count
        rows = np.stack((first, (first + 1 + tokens % (count - 1)) % count), -1)
        rows = np.repeat(rows[:, None], layers, 1).astype(np.uint8)
        end = 0
        for segment in branch.segments:
            end += len(segment.token_ids)
            if isinstance(segment, Completion):
                segment.routes = Routes(0, rows[: end - 1])
    return batch


def steps(
    directory: str, layouts: list[dict[str, Any]], scratch: str, merges_prefixes: bool = True
) -> list[dict[str, Any]]:
    """For each layout two batches; the whole gradients of both are written to scratch/<number of the layout>."""
    report = []
    for number, layout in enumerate(layouts):
        config = run_config(directory)
        config.training.tokens_per_micro_batch, config.training.max_norm = 120, 0.0
        # Both gradients are those of the same weights.
        config.optimizer.lr = 0.0
        config.grpo.geometric_mask = []
        config.compile.backend = "aot_eager"
        for key, value in layout.items():
            section, field = key.split(".")
            setattr(getattr(config, section), field, value)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        trainer = SpiedTrainer(config, merges_prefixes)
        fill(trainer.policy)
        gradients: dict[str, torch.Tensor] = {}

        def look(*_: object, into: dict[str, torch.Tensor] = gradients, trainer: SpiedTrainer = trainer) -> None:
            for name, parameter in trainer.policy.named_parameters():
                if parameter.grad is not None:
                    into[f"{len(trainer.given)}.{name}"] = full_tensor(parameter.grad).clone()

        trainer.optimizer.register_step_pre_hook(look)
        figures = []
        counted = Collectives()
        for seed in range(2):
            batch = make_tree(seed)
            if config.grpo.routing_replay:
                args = read_model_args(directory)
                assert args.experts is not None
                with_routes(batch, args.experts.count, args.num_hidden_layers)
            # No graph is compiled where somebody looks at each operator, and looking takes time.
            with contextlib.nullcontext() if config.compile.enable or seed else counted:
                figures.append(trainer.train_batch(batch).metrics)
        if device.rank() == 0:
            save_file(gradients, Path(scratch) / str(number))
        report.append(
            {
                "computed": [[micro_batch.layout.total for micro_batch in part] for part, _ in trainer.given],
                "share": [figure["computed_share"] for figure in figures],
                "trained": [figure["trained_tokens"] for figure in figures],
                "loss": [figure["loss"] for figure in figures],
                "collectives": counted.names,
                "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
                "breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
            }
        )
    return report


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.exhaustive] if case == "compiled" else []) for case in CASES]
)
def test_layouts_agree(tiny_checkpoint: Callable[..., Path], tmp_path: Path, case: str) -> None:
    mixture, common, layouts = CASES[case]
    directory = make_mixture(tmp_path / "mixture", "qwen3_moe") if mixture else tiny_checkpoint()
    alone, two = tmp_path / "alone", tmp_path / "two"
    alone.mkdir()
    two.mkdir()
    (apart,) = steps(str(directory), [common], str(alone), merges_prefixes=False)
    expected = load_file(alone / "0")
    assert apart["share"] == [1.0, 1.0]
    assert any(map(is_factor, expected)) == (case == "adapters")
    ranks = run_distributed(
        "tests.unit_tests.distributed.test_merged_packs:steps",
        2,
        directory=str(directory),
        layouts=[common | layout for layout in layouts],
        scratch=str(two),
    )
    for number, layout in enumerate(layouts):
        rows = [rank[number] for rank in ranks]
        for row in rows:
            assert max(row["share"]) < 0.75 and row["trained"] == apart["trained"]
            assert row["loss"] == pytest.approx(apart["loss"], rel=1e-5, abs=1e-6)
            assert row["graphs"] == ("compile.enable" in layout) and row["breaks"] == 0
        assert rows[0]["collectives"] == rows[1]["collectives"] and (rows[0]["collectives"] or rows[0]["graphs"])
        first, second = (row["computed"] for row in rows)
        # Ranks have equally many micro-batches, of several tokens; data-parallel ones differ.
        assert [*map(len, first)] == [*map(len, second)] and max(map(len, first)) > 1
        assert (first == second) == (TP in layout)
        found = load_file(two / str(number))
        assert found.keys() == expected.keys()
        ours, reference = (torch.cat([run[name].double().flatten() for name in expected]) for run in (found, expected))
        # Tensor parallelism alone rounds the gradients of adapters by 6e-6.
        assert ((ours - reference).norm() / reference.norm()).item() <= 1e-5, layout
