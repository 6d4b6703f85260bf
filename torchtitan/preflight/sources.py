"""Checks of [[source]], and what the plan says of it."""

from __future__ import annotations

from collections import Counter

from torchtitan.config.evaluations import task_configs
from torchtitan.config.job_config import JobConfig
from torchtitan.config.optimizer_step import groups_per_batch
from torchtitan.config.reward_names import reward_weights
from torchtitan.config.source_configs import source_configs, source_weights
from torchtitan.config.teachers import teacher_id
from torchtitan.errors import nearest
from torchtitan.preflight.check import Check
from torchtitan.rollout.data.source_scheduler import SourceScheduler


def check_sources(check: Check) -> None:
    """Check what no source shows by itself."""
    for text in _problems(check.config):
        check.say("source", f"[[source]]: {text}")
    names = [eval_set["name"] for eval_set in check.config.eval.set]
    for name in sorted({name for name in names if names.count(name) > 1}):
        check.say("eval.set", f"[[eval.set]]: name = {name!r} stands more than once: every set needs a name of its own")
    known = [source.name for source in check.config.source]
    for eval_set in check.config.eval.set:
        source_name = eval_set.get("source", "")
        if source_name and source_name not in known:
            text = f"there is no such source{nearest(source_name, known)}"
            check.say("eval.set", f"[[eval.set]] {eval_set['name']}: source = {source_name!r}: {text}")
        if eval_set.get("eval.num_prompts") == 0:
            check.say("eval.set", f"[[eval.set]] {eval_set['name']}: num_prompts = 0: leave the set out instead")
    grpo = check.config.grpo
    observes = grpo.observation_coefficient > 0 and check.config.job.stage == "grpo"
    without = not any(source_config.environment.is_used for _, source_config in source_configs(check.config))
    by_turn = grpo.advantage_level == "turn"
    text = "needs environment.factory: only an environment rewards single turns"
    check.refuse("grpo.advantage_level", by_turn and without, text)
    text = "needs an [environment] or tools, which write between the turns"
    check.refuse("grpo.observation_coefficient", observes and without, text)
    tasks = task_configs(check.config).values()
    gateways = {
        task_config.environment.key(task_config.rollout.stop_token_ids): task_config.environment.gateway.port
        for task_config in tasks
        if task_config.environment.uses_gateway
    }
    for port, count in Counter(gateways.values()).items():
        if port and count > 1:
            text = f"environment.gateway.port = {port} is that of {count} gateways: sources and evaluation sets whose"
            text += " [environment] or stop_token_ids differ have one each. Give each its own port, or 0 for a free one"
            check.say("environment.gateway.port", text)


def _problems(config: JobConfig) -> list[str]:
    sources, texts = config.source, list[str]()
    twice = [name for name, count in Counter(source.name for source in sources).items() if count > 1]
    texts += [f"name = {name!r} stands more than once: every source needs a name of its own" for name in twice]
    configs = [source_config for _, source_config in source_configs(config)]
    rewards = [
        name
        for source_config in configs
        for name in (*source_config.rewards.functions, source_config.environment.reward_name)
    ]
    labels = {name.rpartition(":")[2] for name in rewards}
    texts += [
        f"name = {source.name!r} is the name of a reward, whose metrics have it already: choose another name"
        for source in sources
        if source.name in labels
    ]
    texts += [
        f"{source.name!r} has weight and epochs: one of them says what its share is"
        for source in sources
        if source.weight is not None and source.epochs is not None
    ]
    if 0 < sum(source.epochs is not None for source in sources) < len(sources):
        texts.append("either all sources have epochs, or none: their shares are compared with each other")
    if config.eval.is_used and config.eval.dataset and len(sources) > 1 and not config.eval.set:
        texts.append(
            "eval.dataset must be empty beside several sources: each has its own eval.dataset, or its held-out share"
        )
    teachers = {teacher_id(source_config) for source_config in configs}
    rewarded = all(source_config.distill.add_rewards for source_config in configs)
    if config.job.stage == "distill" and sources and teachers == {None} and rewarded:
        texts.append("none has a teacher: job.stage = grpo learns from rewards alone")
    if config.grpo.loss_type == "bnpo" and len(teachers) > 1:
        texts.append('all must have one teacher with grpo.loss_type = "bnpo", which counts all micro-batches alike')
    is_weighted = all(
        len(source_config.rewards.weights) in (0, len(source_config.rewards.functions)) for source_config in configs
    )
    if config.grpo.reward_aggregation == "normalize_each" and is_weighted:
        weights = reward_weights(config)
        differing = {
            name
            for source_config in configs
            for name, weight in reward_weights(source_config).items()
            if weight != weights[name]
        }
        texts += [f"{name!r} must have one weight in all sources (normalize_each)" for name in sorted(differing)]
    return texts


def describe_mix(config: JobConfig) -> list[str]:
    """Return the plan's lines about the sources; none without [[source]]."""
    sources = config.source
    if not sources:
        return []
    if any(source.epochs for source in sources):
        parts = [f"{source.name} {source.epochs:g} × its rows" for source in sources]
        return [f"mix: shares of every batch in relation to {', '.join(parts)}"]
    scheduler = SourceScheduler(source_weights(config, [1] * len(sources)), groups_per_batch(config))
    first = [
        f"{source.name} {scheduler.share(source.name):.1%} ({scheduler.upcoming(source.name, 1)[0]} groups)"
        for source in sources
    ]
    return [f"mix: {', '.join(first)} of the first batch; whole groups left over are carried to the next"]
