"""Rules for the training step: the device, the mesh, the batch, the optimizer, lengths and the objective."""

from __future__ import annotations

import math

from torchtitan.config.gpu_defaults import device_problem
from torchtitan.config.job_config import JobConfig
from torchtitan.config.objectives import describe
from torchtitan.config.optimizer_step import group_size
from torchtitan.config.reward_names import learns_from_rewards
from torchtitan.preflight.check import Check, may_take, own_function_problem
from torchtitan.utils.definitions import is_installed

# A cap on the importance ratio above this value does not count as a bound.
NO_BOUND = 10.0


def check_device(check: Check) -> None:
    if problem := device_problem():
        check.say("", problem)


def check_parallelism(check: Check) -> None:
    parallelism, ranks = check.config.parallelism, check.ranks
    replicate, tensor = parallelism.data_parallel_replicate_degree, parallelism.tensor_parallel_degree
    shard, context = parallelism.data_parallel_shard_degree, parallelism.context_parallel_degree
    if any(key.startswith("parallelism.") for key in check.wrong):
        return
    started = f"{ranks} rank{'s' if ranks > 1 else ''} (NGPU)"
    if shard == -1:
        key = "parallelism.tensor_parallel_degree" if tensor > 1 else "parallelism.data_parallel_replicate_degree"
        among = f"context_parallel_degree {context} × " if context > 1 else ""
        text = (
            f"data_parallel_replicate_degree {replicate} × {among}tensor_parallel_degree {tensor} must divide {started}"
        )
        check.refuse(key, ranks % (replicate * context * tensor), text)
        return
    text = f"data_parallel_replicate_degree {replicate} × data_parallel_shard_degree {shard} × "
    product = replicate * shard * context * tensor
    text += f"context_parallel_degree {context} × tensor_parallel_degree {tensor} = {product} must equal {started}"
    check.refuse("parallelism.data_parallel_shard_degree", product != ranks, text)


def check_batch(check: Check) -> None:
    grpo, size = check.config.grpo, check.config.training.global_batch_size
    if check.wrong & {"training.global_batch_size", "grpo.group_size"}:
        return
    per_row = group_size(check.config)
    groups = size // per_row
    if size % per_row:
        text = f"{size} must be divisible by grpo.group_size = {grpo.group_size}"
        check.refuse("training.global_batch_size", True, text)
    elif groups % grpo.num_minibatches:
        text = f"must divide the {groups} groups of a batch ({size} / grpo.group_size = {per_row})"
        check.refuse("grpo.num_minibatches", True, text)


def check_optimizer(check: Check) -> None:
    name = check.config.optimizer.name
    missing = name == "AdamW8bit" and not is_installed("bitsandbytes") and not check.planning
    text = "needs the package bitsandbytes: EXTRAS=bitsandbytes in front of ./run_grpo.sh installs it"
    check.refuse("optimizer.name", missing, text)


def check_lengths(check: Check) -> None:
    training, grpo = check.config.training, check.config.grpo
    text = f"must be less than training.seq_len = {training.seq_len}, which holds prompt and completion"
    samples = check.config.has_engines or check.config.rollout.replay
    too_long = samples and check.config.rollout.max_completion_tokens >= training.seq_len
    check.refuse("rollout.max_completion_tokens", too_long, text)
    text = f"must be at least training.seq_len = {training.seq_len}: a sequence is never split"
    check.refuse("training.tokens_per_micro_batch", training.tokens_per_micro_batch < training.seq_len, text)
    if not describe(grpo.loss_type).caps_weight:
        highest = 1 + grpo.clip_range[1]
        text = f"must be 0 (off), or greater than 1 + grpo.epsilon_high = {highest:g}"
        check.refuse("grpo.delta", 0 < grpo.delta <= highest, text)


def check_objective(check: Check) -> None:
    grpo, refuse = check.config.grpo, check.refuse
    for key in ("loss_type", "advantage", "off_policy_correction", "group_filter"):
        name = getattr(grpo, key)
        is_own = name and (":" in name or key == "group_filter")
        if is_own and (problem := own_function_problem(name, f"grpo.{key}")):
            check.say(f"grpo.{key}", f"grpo.{key}: {problem}")
    split = grpo.observation_coefficient > 0 and check.config.parallelism.context_parallel_degree > 1
    refuse("grpo.observation_coefficient", split, "needs parallelism.context_parallel_degree = 1")
    text = "needs grpo.recompute_old_log_probs = true, which computes the entropies"
    refuse("grpo.entropy_top_share", grpo.entropy_top_share < 1 and not grpo.recompute_old_log_probs, text)
    # In blocking mode, too, groups are sampled ahead of their batch.
    stale = grpo.async_weight_update or check.config.rollout.max_staleness > 0
    stale = stale and learns_from_rewards(check.config)
    if stale and not grpo.allow_uncorrected and (key := _unbounded(check.config)):
        text = f"with it, an off-policy token may count more than {NO_BOUND:g} times (grpo.epsilon_high bounds nothing "
        text += "where the advantage is negative), and the run trains on samples of older policies: set "
        bounds = {"grpo.delta": "grpo.delta to 3", "grpo.loss_type": "another objective, whose ratio has a bound"}
        if ":" in grpo.loss_type and _is_separable(grpo.loss_type) and not grpo.has_sequence_ratios:
            bounds["grpo.loss_type"] = "grpo.recompute_old_log_probs = false and off_policy_correction = icepop or mask"
        caps = f"a correction and caps of at most {NO_BOUND:g}"
        on_policy = "grpo.async_weight_update = false with rollout.max_staleness = 0"
        refuse(key, True, f"{text}{bounds.get(key, caps)}, or {on_policy}, or grpo.allow_uncorrected = true")
    single = grpo.reward_aggregation == "normalize_each" and len(check.config.rewards.functions) == 1
    single = single and not check.config.environment.reward_name
    refuse("grpo.reward_aggregation", single, "needs at least two of rewards.functions")
    both = grpo.advantage_level == "turn" and grpo.reward_aggregation == "normalize_each"
    refuse("grpo.advantage_level", both, "needs grpo.reward_aggregation = sum")


def _unbounded(config: JobConfig) -> str:
    """Return the key that lets a token's weight exceed NO_BOUND for some π, μ and advantage; empty if none does."""
    grpo = config.grpo
    caps = {"truncate": grpo.importance_cap, "mask": grpo.importance_cap, "icepop": grpo.icepop_band[1]}
    correction = caps.get(grpo.off_policy_correction, math.inf)
    key, objective = grpo.largest_weight
    if grpo.recompute_old_log_probs:
        # The objective sees π/π_old; the correction bounds π_old/μ.
        if correction > NO_BOUND:
            return "grpo.off_policy_correction"
    elif grpo.has_sequence_ratios:
        objective = min([objective, *grpo.geometric_mask[1:]])
    elif grpo.off_policy_correction != "truncate" and _is_separable(grpo.loss_type):
        objective = min(objective, correction)  # in direct mode, masks see π/μ too
    return f"grpo.{key}" if objective > NO_BOUND else ""


def _is_separable(loss_type: str) -> bool:
    return describe(loss_type).separable and not may_take(loss_type, "sequences")
