"""Build the validated configuration of a job from a command line or Python values.

Rules for a single value are next to its key in torchtitan/config, those for several tables or the machine in the
modules beside this one. No torch here. Only small files are read, and nothing is started.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from torchtitan.config.evaluations import eval_configs
from torchtitan.config.job_config import JobConfig, table_types
from torchtitan.config.reading import OVERRIDES, Draft, Problem, read_command_line
from torchtitan.config.run_folders import FROM_PYTHON
from torchtitan.config.slurm import expand_servers
from torchtitan.config.source_configs import source_configs
from torchtitan.errors import ConfigError
from torchtitan.models.shape.compute_type import choose_types
from torchtitan.models.shape.exports import newest_export, without_links
from torchtitan.preflight.check import Check
from torchtitan.preflight.checkpoint import check_checkpoint, unusual_tokens
from torchtitan.preflight.files import check_files
from torchtitan.preflight.gpu_memory import tight_gpu
from torchtitan.preflight.hub import HubFolders
from torchtitan.preflight.inference import check_inference, check_weight_sync
from torchtitan.preflight.memory import few_descriptors, tight_memory
from torchtitan.preflight.model import check_lora, check_model, check_stage
from torchtitan.preflight.sources import check_sources
from torchtitan.preflight.tasks import check_environment, check_evaluation, check_rewards, check_rollout
from torchtitan.preflight.training import (
    check_batch,
    check_device,
    check_lengths,
    check_objective,
    check_optimizer,
    check_parallelism,
)
from torchtitan.utils.ranks import local_rank, world_size

Config = str | PathLike[str] | Mapping[str, Any] | JobConfig
"""A TOML file, its tables, or a configuration"""
MODEL, TEACHER = "model.hf_assets_path", "distill.teacher"

RULES: tuple[Callable[[Check], None], ...] = (
    check_stage, check_device, check_parallelism, check_batch, check_optimizer, check_lengths,
    check_objective, check_lora, check_rollout, check_rewards, check_environment, check_inference,
    check_weight_sync, check_evaluation, check_files, check_model,
)  # fmt: skip
"""For the configuration of each source, in the order in which problems are told"""
SET_RULES = (check_rollout, check_rewards, check_environment, check_evaluation)
"""For an evaluation set, which is sampled and judged, and nothing else"""


def load_config(argv: Sequence[str]) -> JobConfig:
    """Return the validated configuration of arguments like ["--job.config_file", "x.toml", "--training.steps", "3"].

    A dry run only plans: with model.flavor it needs no checkpoint files.
    --help prints every key and exits with code 0.

    Raises:
        ConfigError: with all problems of the file, the command line and the values together.
    """
    return validated(*read_command_line(argv))


def draft_of(config: Config, overrides: Mapping[str, Any]) -> Draft:
    """Return the draft of a configuration given from Python; `overrides` has tables, or values by `table.key`."""
    draft = Draft()
    if isinstance(config, JobConfig):
        # Not asdict: an attribute that is not a key is a typo, and must be refused like any other.
        draft.add({table: _as_table(getattr(config, table)) for table in table_types() if "." not in table}, "config")
        draft.set_sources([source.given() for source in config.source], "config")
    elif isinstance(config, Mapping):
        draft.add(config, "config")
    else:
        draft.add_file(fspath(config))
    draft.add(overrides, OVERRIDES)
    return draft


def _as_table(value: Any) -> Any:
    if not hasattr(value, "__dict__"):
        return value
    return {key: _as_table(inner) for key, inner in vars(value).items()}


def validated(draft: Draft, planning: bool = False) -> JobConfig:
    """Return the configuration of a draft. `planning`: nothing will be started, and files may be missing.

    Raises:
        ConfigError: with all problems together.
    """
    config, problems = draft.build()
    # An evaluation or a resumed run finds the functions of a run from Python where that has written them.
    own_code = Path(config.job.dump_folder).absolute() / FROM_PYTHON
    if own_code.is_dir() and str(own_code) not in sys.path:
        sys.path.append(str(own_code))
    config.inference.servers = expand_servers(config.inference.servers)
    hub = HubFolders(config)
    # A plan takes the shape from the flavor, without a network.
    path = config.model.hf_assets_path
    config.model.hf_assets_path = newest_export(hub.find(MODEL, path, asks=not (planning and config.model.flavor)))
    config.distill.teacher = newest_export(hub.find(TEACHER, config.distill.teacher))
    for source in config.source:
        if TEACHER in source.values:
            source.values[TEACHER] = newest_export(hub.find(TEACHER, source.values[TEACHER], of_source=True))
    problems += hub.problems
    config.rollout.replay = without_links(config.rollout.replay)
    config.lora.adapter_path = without_links(config.lora.adapter_path)
    draft.chosen = choose_types(config)
    if draft.is_complete:
        lacking = hub.lacking(config)
        # The keys that were just reported now have their defaults.
        problems += validate(config, planning or bool(lacking), frozenset(problem.key for problem in problems))
        if lacking and not problems and not planning:
            # A mistake is said before gigabytes are downloaded, and what needs the weights is checked after that.
            hub.download_weights(lacking)
            problems += hub.problems or validate(config)
    if problems:
        raise ConfigError([problem.text for problem in problems])
    return config


def ready(draft: Draft) -> JobConfig:
    """Return the configuration of a run that starts now, and say what was chosen for it and what may go wrong.

    Raises:
        UserError: as in `validated`.
    """
    config = validated(draft)
    if local_rank() == 0:
        for kind, text in (
            ("auto", draft.chosen),
            ("warning", tight_memory(config, world_size())),
            ("warning", tight_gpu(config, world_size())),
            ("warning", few_descriptors(config)),
            ("warning", unusual_tokens(config)),
        ):
            if text:
                print(f"{kind}: {text}", file=sys.stderr, flush=True)
    return config


def validate(config: JobConfig, planning: bool = False, wrong: frozenset[str] = frozenset()) -> list[Problem]:
    """Return all problems of `config` for world_size() ranks.

    With `planning`, nothing will be trained: a shape from model.flavor is enough, without checkpoint files. The keys in
    `wrong` have already been refused.
    """
    check = Check(config, world_size(), planning, wrong)
    check_sources(check)
    check_checkpoint(check)
    found = [(name, _validate_source(source_config, planning, wrong)) for name, source_config in source_configs(config)]
    # What all sources share is said once, and without their names.
    texts = [{problem.text for problem in problems} for _, problems in found]
    common = set[str].intersection(*texts)
    check.problems += [problem for problem in found[0][1] if problem.text in common]
    for name, problems in found:
        for problem in problems:
            if problem.text not in common:
                check.problems.append(Problem(problem.key, f"source {name}: {problem.text}"))
    of_sources = set[str].union(*texts)
    for name, set_config in eval_configs(config) if config.eval.set else []:
        for problem in _validate_source(set_config, planning, wrong, SET_RULES):
            if problem.text not in of_sources:
                check.problems.append(Problem(problem.key, f"[[eval.set]] {name}: {problem.text}"))
    return check.problems


def _validate_source(
    config: JobConfig, planning: bool, wrong: frozenset[str], rules: Sequence[Callable[[Check], None]] = RULES
) -> list[Problem]:
    check = Check(config, world_size(), planning, wrong)
    for rule in rules:
        rule(check)
    return check.problems
