"""What the policy is compared with: teachers, and the reference of a KL term. And the weights that a run goes on using
for that, but does not train."""

from __future__ import annotations

import copy
import os

from torchtitan.config.job_config import JobConfig
from torchtitan.config.source_configs import source_configs

# Values of distill.hint that no column gives: the hint is known once the samples of a group are scored.
SUCCESS, FEEDBACK, SUCCESS_OR_FEEDBACK = "success", "feedback", "success_or_feedback"
HINTS_AFTER_SCORING = (SUCCESS, FEEDBACK, SUCCESS_OR_FEEDBACK)


def compares_vocabulary(config: JobConfig) -> bool:
    """Whether the policy is compared with its teacher over the whole vocabulary, not only at the sampled tokens."""
    return config.job.stage == "distill" and config.distill.divergence != "sampled"


def teacher_id(source_config: JobConfig) -> str | None:
    """What the policy is compared with on the samples of a source: a server's address, a checkpoint directory, or
    (empty) itself: with a hint, as it is or as its moving average; as it began, for a KL term. None: with nothing."""
    stage, distill = source_config.job.stage, source_config.distill
    if stage == "grpo" and source_config.grpo.kl_coefficient > 0:
        return ""
    if stage != "distill":
        return None
    if distill.server.url:
        return distill.server.url
    if distill.teacher:
        return os.path.realpath(distill.teacher)
    return "" if distill.hint else None


def hint_column(config: JobConfig) -> str:
    """The column of the dataset that has the hints; empty where there are none, or they follow from the scores."""
    return "" if config.distill.hint in HINTS_AFTER_SCORING else config.distill.hint


def hints_after_scoring(config: JobConfig) -> bool:
    """Whether the teacher's hints are known only once the samples of a group are scored."""
    return config.job.stage == "distill" and config.distill.hint in HINTS_AFTER_SCORING


def held_references(config: JobConfig) -> dict[str, JobConfig]:
    """The second policies that the trainer holds: one to stay close to, each teacher once, or the moving average of a
    policy that teaches itself. What teacher_id() says -> the configuration of a source that has it."""
    held: dict[str, JobConfig] = {}
    for _, source_config in source_configs(config):
        name = teacher_id(source_config)
        if name is None or source_config.distill.server.url:
            continue
        if name or source_config.job.stage == "grpo" or source_config.grpo.reference_ema_decay > 0:
            held.setdefault(name, source_config)
    return held


def teacher_config(config: JobConfig) -> JobConfig:
    """The configuration of the policy that teaches a source: as the trained one is laid out, with its own weights."""
    of_teacher = copy.deepcopy(config)
    of_teacher.model.hf_assets_path, of_teacher.model.name, of_teacher.model.flavor = config.distill.teacher, "auto", ""
    of_teacher.lora.rank, of_teacher.lora.base_bits, of_teacher.grpo.reference_ema_decay = 0, 16, 0.0
    return of_teacher


def teacher_directories(config: JobConfig) -> dict[str, str]:
    """The directories of all teachers that the trainer holds, by the key that names each."""
    held = held_references(config)
    directories: dict[str, str] = {}
    for name, source_config in source_configs(config):
        teacher = teacher_id(source_config)
        if teacher and teacher in held:
            directories[f"distill.teacher of {name}" if name else "distill.teacher"] = teacher
    return directories


def frozen_weights(config: JobConfig) -> dict[str, str]:
    """The directories, by the key that names each, of weights that the run goes on using but does not train: those that
    adapters are added to, those of a KL term's reference that does not follow the policy, and those of teachers."""
    is_fixed = config.lora.trains_only_adapters or config.grpo.reference_ema_decay == 0
    stays_close = "" in held_references(config) and is_fixed
    found = {}
    if config.lora.rank or stays_close:
        found["model.hf_assets_path"] = config.model.hf_assets_path
    if config.lora.rank and stays_close:
        found["lora.adapter_path"] = config.lora.adapter_path
    return found | teacher_directories(config)


def keeps_initial_adapters(config: JobConfig) -> bool:
    """Whether the policy holds a frozen copy of the adapters that it began with, as the reference of a KL term."""
    return config.lora.trains_only_adapters and bool(config.lora.adapter_path) and "" in held_references(config)
