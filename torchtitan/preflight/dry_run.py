"""What --dry-run prints: the plan, what was set, and which of that has no effect. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torchtitan.config.evaluations import task_configs
from torchtitan.config.job_config import JobConfig, config_to_toml, value_at
from torchtitan.config.kinds import chooser_of
from torchtitan.config.objectives import OBJECTIVES, describe
from torchtitan.config.reading import PLACE, Draft
from torchtitan.config.teachers import held_references
from torchtitan.config.values import show
from torchtitan.preflight.plan import describe_plan


def describe_dry_run(draft: Draft, config: JobConfig, ranks: int) -> str:
    """Return the plan as comments and then, as TOML, the keys that were set with their resolved values, or all keys if
    the draft asks for them. Everything loads as a config file.

    Raises:
        UserError: as in describe_plan.
    """
    lines = [describe_plan(config, ranks, draft.chosen), ""]
    if notes := list(keys_without_effect(draft, config)):
        lines += ["# Set, but without effect in this run:", *(f"#   {note}" for note in notes), ""]
    if draft.shows_defaults:
        return "\n".join([*lines, "# All keys", config_to_toml(config)])
    comments = {key: PLACE if place == PLACE else "" for key, (place, _) in draft.written.items()}
    comments.pop("job.config_file", None)
    files = f"in {config.job.config_file} and " if config.job.config_file else ""
    heading = f"# Set {files}on the command line (--dry-run all prints every key)"
    return "\n".join([*lines, heading, config_to_toml(config, comments)])


def keys_without_effect(draft: Draft, config: JobConfig) -> Iterator[str]:
    """Yield a line for each key that was set and that this run does not use."""
    for key, (place, written) in draft.written.items():
        chosen_by, kind = chooser_of(key.rpartition(".")[0])
        if chosen_by and value_at(config, chosen_by) != kind:
            reason = f"{chosen_by} is {show(value_at(config, chosen_by))}"
        else:
            reason = _unused_feature(key, config)
        if reason:
            yield f"{place}: {key} = {written}: {reason}"


def _unused_feature(key: str, config: JobConfig) -> str:
    """Why the feature that a key belongs to is not in use; empty where it is."""
    for prefixes, reason_of in FEATURES:
        if key.startswith(prefixes) and key not in SWITCHES and (reason := reason_of(config)):
            return reason
    return ""


def _unless(key: str, *values: object) -> Callable[[JobConfig], str]:
    """A reason that holds where a key has none of these values."""

    def reason(config: JobConfig) -> str:
        value = value_at(config, key)
        return "" if value in values else f"{key} is {show(value)}"

    return reason


def _without_environment(config: JobConfig) -> str:
    used = any(task_config.environment.is_used for task_config in task_configs(config).values())
    return "" if used else "there are no environment.factory, tools, agent or verifiers"


def _without_evaluation(config: JobConfig) -> str:
    return "" if config.eval.is_used else "eval.num_prompts is 0"


def _without_adapters(config: JobConfig) -> str:
    return "" if config.lora.rank else "lora.rank is 0"


def _without_engines(config: JobConfig) -> str:
    return "" if config.has_engines else "the run samples nothing"


def _without_reference(config: JobConfig) -> str:
    if "" in held_references(config):  # to stay close to, or the average of a policy that teaches itself
        return ""
    return "the teacher is another model" if config.job.stage == "distill" else "grpo.kl_coefficient is 0"


def _without_clipping(config: JobConfig) -> str:
    name = config.grpo.loss_type
    # A function of the user's own may clip.
    return f"loss_type {name} does not clip" if name in OBJECTIVES and OBJECTIVES[name].clip is None else ""


def _without_lower_clip(config: JobConfig) -> str:
    is_cap = describe(config.grpo.loss_type).caps_weight
    return f"loss_type {config.grpo.loss_type} caps the weight by epsilon_high alone" if is_cap else ""


def _without_delta(config: JobConfig) -> str:
    name = config.grpo.loss_type
    bounds_otherwise = name in OBJECTIVES and OBJECTIVES[name].bounded_by != "delta"
    return f"loss_type {name} does not use it" if bounds_otherwise else ""


def _without_held_out_share(config: JobConfig) -> str:
    return "eval.dataset has the held-out prompts" if config.eval.dataset else ""


SWITCHES = frozenset(
    {
        "eval.num_prompts", "lora.rank", "checkpoint.enable",
        "environment.factory", "environment.tools", "environment.agent", "environment.verifiers.id",
    }
)  # fmt: skip
"""The keys that turn these features on"""

FEATURES: tuple[tuple[tuple[str, ...], Callable[[JobConfig], str]], ...] = (
    (("sft.",), _unless("job.stage", "sft")),
    (("distill.",), _unless("job.stage", "distill")),
    (("eval.",), _without_evaluation),
    (("lora.",), _without_adapters),
    (("environment.",), _without_environment),
    (("inference.", "rewards.num_workers", "rewards.timeout_s"), _without_engines),
    (("checkpoint.interval", "checkpoint.async_mode", "checkpoint.keep_latest_k"), _unless("checkpoint.enable", True)),
    (("grpo.icepop_band",), _unless("grpo.off_policy_correction", "icepop")),
    (("grpo.reference_ema_decay",), _without_reference),
    (("grpo.epsilon_low", "grpo.epsilon_high"), _without_clipping),
    (("grpo.epsilon_low",), _without_lower_clip),
    (("grpo.delta",), _without_delta),
    (("lr_scheduler.min_lr_factor",), _unless("lr_scheduler.decay_type", "linear", "cosine")),
    (("rollout.held_out_fraction",), _without_held_out_share),
)
"""Beginnings of keys, and a function that says why the feature behind them is not in use, or nothing"""
