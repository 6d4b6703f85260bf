"""What job.stage asks of the rest of a configuration. No torch here; of checkpoints only small files are read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from torchtitan.config.derived import has_engines, has_environment
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.models.shape import read_teacher_shape
from torchtitan.preflight.check import Check

TEACHER = "distill.teacher"


def check_stage(check: Check) -> None:
    """Problems of [sft], [distill] and of keys that another stage has no use for."""
    config = check.config
    text = "needs evaluations that sample: eval.enable = true, and sft.sample = true in stage sft"
    check.refuse("eval.stop_at", config.eval.stop_at and not (config.eval.enable and has_engines(config)), text)
    if config.job.stage == "sft":
        _check_sft(check)
    else:
        text = "needs job.stage = sft"
        check.refuse("sft.epochs", config.sft.epochs, text)
        check.refuse("sft.sample", config.sft.sample, text)
    if config.job.stage == "distill":
        _check_distill(check)
    else:
        text = "needs job.stage = distill"
        check.refuse(TEACHER, config.distill.teacher, text)
        check.refuse("distill.teacher_url", config.distill.teacher_url, text)
        check.refuse("distill.add_rewards", config.distill.add_rewards, text)


def _check_sft(check: Check) -> None:
    config, refuse = check.config, check.refuse
    grpo, rollout, stage = config.grpo, config.rollout, "in job.stage = sft, where nothing is sampled to train on"
    refuse("rollout.replay", rollout.replay, f"must be empty {stage}")
    refuse("rollout.temperature", rollout.temperature != 1, "must be 1 in job.stage = sft: log-probs are divided by it")
    refuse("job.stage", has_environment(config), "has no use for [environment]")
    for key, asked, off in (
        ("recompute_old_log_probs", grpo.recompute_old_log_probs, "false"),
        ("routing_replay", grpo.routing_replay, "false"),
        ("kl_coefficient", grpo.kl_coefficient > 0, "0"),
        ("entropy_coefficient", grpo.entropy_coefficient > 0, "0"),
    ):
        refuse(f"grpo.{key}", asked, f"must be {off} {stage}")
    shared = config.inference.mode == "colocate" or config.inference.sleep_level > 0
    text = "needs inference.mode = server with inference.sleep_level = 0: steps wait for no actor"
    refuse("sft.sample", config.sft.sample and shared, text)
    refuse("sft.sample", config.sft.sample and not config.eval.enable, "needs eval.enable = true")
    judged = config.rewards.functions or config.eval.reward_function
    refuse("rewards.functions", config.sft.sample and not judged, "sft.sample = true needs one that judges")


def _check_distill(check: Check) -> None:
    config, refuse = check.config, check.refuse
    distill, grpo, rollout = config.distill, config.grpo, config.rollout
    text = "must be 0 in job.stage = distill, where the teacher has the reference's place"
    refuse("grpo.kl_coefficient", grpo.kl_coefficient > 0, text)
    refuse("distill.coefficient", distill.coefficient == 0, "must be greater than 0: nothing would be distilled")
    refuse(
        TEACHER,
        not distill.teacher,
        "must be the teacher's checkpoint directory, also with distill.teacher_url",
    )
    if distill.teacher_url:
        url = re.fullmatch(r"https?://[^/\s]+/?", distill.teacher_url)
        refuse("distill.teacher_url", url is None, "must be a URL such as http://127.0.0.1:8000")
        text = "must be 1 with distill.teacher_url: a server gives log-probs at temperature 1"
        refuse("rollout.temperature", rollout.temperature != 1, text)
        cut = rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0
        text = "must be 1, with top_k = 0 and min_p = 0, where distill.teacher_url: a server knows of no cut"
        refuse("rollout.top_p", cut, text)
    functions = config.rewards.functions or config.eval.reward_function or has_environment(config)
    refuse(
        "eval.enable", config.eval.enable and not functions, "must be false without [rewards] functions, which judge"
    )
    if distill.teacher and not check.planning:
        _check_teacher(check, config)


def _check_teacher(check: Check, config: JobConfig) -> None:
    """The teacher must be a checkpoint that this layout can hold, with the policy's vocabulary."""
    directory = Path(config.distill.teacher)
    served = bool(config.distill.teacher_url)
    for name in ("tokenizer.json",) if served else ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            check.refuse(TEACHER, True, f"there is no {name} in it (looked in {Path.cwd()})")
            return
    if not served:
        _check_shape(check, config)
    own = Path(config.model.hf_assets_path) / "tokenizer.json"
    if own.is_file() and (difference := _difference(own, directory / "tokenizer.json")):
        text = f"its tokenizer is not that of model.hf_assets_path ({difference}): log-probs of its tokens mean nothing"
        check.refuse(TEACHER, True, text)


def _check_shape(check: Check, config: JobConfig) -> None:
    try:
        args = read_teacher_shape(config)
    except UserError as error:
        check.say(TEACHER, str(error))
        return
    assert args is not None
    tensor, experts = config.parallelism.tensor_parallel_degree, config.parallelism.expert_parallel_degree
    sizes = [args.num_attention_heads, args.num_key_value_heads, args.intermediate_size if args.dense_layers else 0]
    text = f"parallelism.tensor_parallel_degree = {tensor} must divide its heads and feed-forward columns"
    check.refuse(TEACHER, any(size % tensor for size in sizes) or (tensor > 1 and args.undivided), text)
    count = 0 if args.experts is None else args.experts.count
    text = f"parallelism.expert_parallel_degree = {experts} must divide its {count} experts"
    check.refuse(TEACHER, count % experts, text)
    text = f"training.seq_len must be at most its max_position_embeddings = {args.max_position_embeddings}"
    check.refuse(TEACHER, config.training.seq_len > args.max_position_embeddings, text)


def _difference(own: Path, other: Path) -> str:
    """How two tokenizers' vocabularies differ, in words; empty where every token has the same id in both."""
    if own.read_bytes() == other.read_bytes():
        return ""
    try:
        mine, theirs = _vocabulary(own), _vocabulary(other)
    except (ValueError, KeyError, TypeError) as error:
        return f"a tokenizer.json cannot be read: {error!r}"
    for token in [*mine, *theirs]:
        if mine.get(token) != theirs.get(token):
            return f"{token!r} is {theirs.get(token, 'not in it')} there and {mine.get(token, 'not in it')} here"
    return ""


def _vocabulary(path: Path) -> dict[str, int]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    tokens = document["model"]["vocab"]
    if isinstance(tokens, list):  # of a unigram model, with scores
        tokens = {entry[0]: number for number, entry in enumerate(tokens)}
    return {**tokens, **{entry["content"]: entry["id"] for entry in document.get("added_tokens", ())}}
