"""What a configuration with a mixture of experts must satisfy, and what is planned for it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.models.shape.checkpoint_shape import find_flavor
from torchtitan.models.shape.costs import estimate_memory
from torchtitan.models.shape.mixture_args import ExpertArgs
from torchtitan.models.shape.model_args import ModelArgs
from torchtitan.preflight.check import Check
from torchtitan.preflight.model import check_model, check_stage

EP, TP = "expert_parallel_degree", "tensor_parallel_degree"
ARGS = replace(
    find_flavor("qwen3", "debug"), family="qwen3_moe", experts=ExpertArgs(12, 2, 40), tie_word_embeddings=False
)


def _problems(
    folder: Path, args: ModelArgs, ranks: int, lora: dict[str, Any], bias_rate: float = 0.0, **parallelism: int
) -> str:
    (folder / "config.json").write_text(json.dumps(args.to_hf_config()))
    for name in ("tokenizer.json", "model.safetensors"):
        (folder / name).touch()
    config = JobConfig()
    config.model.hf_assets_path, config.training.seq_len = str(folder), 64
    config.training.expert_bias_rate = bias_rate
    for key, value in parallelism.items():
        setattr(config.parallelism, key, value)
    for key, value in lora.items():
        setattr(config.lora, key, value)
    check = Check(config, ranks, planning=False)
    check_model(check)
    return "\n".join(problem.text for problem in check.problems)


@pytest.mark.parametrize(
    ("ranks", "lora", "parallelism", "problem"),
    [
        (8, {}, {EP: 8}, "must divide the model's 12 experts"),
        (4, {}, {EP: 3}, "must divide the 4 ranks"),
        (12, {}, {EP: 2}, "leaves 6 ranks to share an expert, which must divide its 40 columns"),
        (4, {"rank": 4}, {EP: 2}, ""),
        (4, {"rank": 3}, {EP: 2}, "128 rows and 3 columns of an adapter (lora.rank)"),
        (1, {"rank": 4, "dropout": 0.1}, {}, "must be 0 with adapters of experts"),
        (1, {"rank": 4, "target_modules": ["up_proj"]}, {}, "name both or neither"),
        (1, {"rank": 4, "modules_to_save": ["down_proj"]}, {}, "not trained whole: leave out down_proj"),
        (1, {"rank": 4, "target_modules": ["q_proj"], "base_bits": 4}, {}, "must be 16: experts are not quantised"),
        (8, {"rank": 4, "target_modules": ["q_proj", "o_proj"]}, {EP: 4, TP: 2}, ""),
    ],
)
def test_what_does_not_fit_is_refused(
    ranks: int, lora: dict[str, Any], parallelism: dict[str, int], problem: str, tmp_path: Path
) -> None:
    problems = _problems(tmp_path, ARGS, ranks, lora, **parallelism)
    assert (problem in problems) if problem else not problems, problems


def test_a_vocabulary_that_leaves_a_rank_without_a_part_is_refused(tmp_path: Path) -> None:
    args = replace(ARGS, vocab_size=5)
    assert "leaves a rank without a part of the model's vocabulary of 5" in _problems(tmp_path, args, 4, {}, **{TP: 4})
    assert "leaves a rank" not in _problems(tmp_path, args, 2, {}, **{TP: 2})


def test_a_teacher_that_the_layout_cannot_hold_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ARGS.to_hf_config()))
    (tmp_path / "tokenizer.json").touch()
    config = JobConfig()
    config.job.stage, config.distill.teacher = "distill", str(tmp_path)
    config.parallelism.tensor_parallel_degree, config.parallelism.expert_parallel_degree = 4, 8
    check = Check(config, 8, planning=False)
    check_stage(check)
    problems = "\n".join(problem.text for problem in check.problems)
    assert "= 4 must divide its heads" in problems and "= 8 must divide its 12 experts" in problems


@pytest.mark.parametrize("family", ["gpt_oss", "glm4_moe"])
def test_experts_that_peft_does_not_adapt_are_refused_by_name(family: str, tmp_path: Path) -> None:
    experts = ExpertArgs(12, 2, 40, shared_intermediate_size=40, stacked=family == "gpt_oss")
    problems = _problems(tmp_path, replace(ARGS, family=family, experts=experts), 1, {"rank": 4})
    assert f"{family} has " in problems and "leave out gate_proj, up_proj, down_proj" in problems


def test_a_bias_that_moves_would_not_reach_engines_that_get_adapters(tmp_path: Path) -> None:
    args = replace(ARGS, family="glm4_moe", experts=ExpertArgs(12, 2, 40, score="sigmoid", bias=True))
    adapters = {"rank": 4, "target_modules": ["q_proj"]}
    assert "must be 0 with lora.rank > 0" in _problems(tmp_path, args, 1, adapters, bias_rate=0.001)
    assert not _problems(tmp_path, args, 1, {}, bias_rate=0.001)


def test_a_dense_model_has_no_expert_parallelism(tmp_path: Path) -> None:
    assert "must be 1: this model has no experts" in _problems(
        tmp_path, find_flavor("qwen3", "debug"), 2, {}, **{EP: 2}
    )


def test_a_config_that_lacks_its_experts_is_refused() -> None:
    config = ARGS.to_hf_config()
    del config["num_experts"], config["num_local_experts"]
    with pytest.raises(UserError, match="lacks num_experts or num_local_experts"):
        ModelArgs.from_hf_config(config)


def test_experts_are_gathered_from_their_own_ranks_alone() -> None:
    args = find_flavor("qwen3_moe", "30B-A3B")
    assert args.num_parameters() == 30_532_122_624  # as its model card says: 30.5B
    assert sum(args.weights_per_token().values()) + args.vocab_size * args.hidden_size == pytest.approx(
        3.04e9, rel=1e-2
    )
    args, config = find_flavor("qwen3_moe", "235B-A22B"), JobConfig()
    together = estimate_memory(config, args, 8).gathered
    config.parallelism.expert_parallel_degree = 2
    # Two layers are held at a time, then with half of their experts.
    assert together - estimate_memory(config, args, 8).gathered == 128 * 3 * 4096 * 1536 * 4
