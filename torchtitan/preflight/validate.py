"""Build the validated configuration of a job from a command line or Python values, with rules for the whole of it.

Rules for a single value are next to its key in torchtitan/config. No torch here. Only small files are read, and nothing
is started.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from torchtitan.config.evaluations import eval_configs, sampled_dataset
from torchtitan.config.gpu_defaults import device_problem
from torchtitan.config.job_config import JobConfig, table_types
from torchtitan.config.objectives import describe
from torchtitan.config.optimizer_step import group_size
from torchtitan.config.reading import OVERRIDES, Draft, Problem, read_command_line
from torchtitan.config.reward_names import learns_from_rewards
from torchtitan.config.rollout_tables import Sandbox
from torchtitan.config.run_folders import CHECKPOINTS, FROM_PYTHON, resumed_folder
from torchtitan.config.slurm import expand_servers
from torchtitan.config.source_configs import source_configs
from torchtitan.config.values import read_toml, show
from torchtitan.errors import ConfigError, UserError, nearest
from torchtitan.models.shape.compute_type import choose_types
from torchtitan.models.shape.exports import newest_export, without_links
from torchtitan.preflight.check import Check, may_take, name_problem, reward_problem
from torchtitan.preflight.checkpoint import check_checkpoint, unusual_tokens
from torchtitan.preflight.gpu_memory import tight_gpu
from torchtitan.preflight.hub import HubFolders
from torchtitan.preflight.inference import check_inference, check_weight_sync
from torchtitan.preflight.memory import few_descriptors, tight_memory
from torchtitan.preflight.model import check_lora, check_model, check_stage
from torchtitan.preflight.sources import check_sources
from torchtitan.rollout.conversation.tool_formats.registry import AUTO, FORMATS
from torchtitan.rollout.data.own_code import (
    columns_for_rewards,
    environment_call_problem,
    function_problem,
    reward_call_problem,
    tool_problem,
)
from torchtitan.rollout.data.peek import peek_columns
from torchtitan.rollout.data.rows import BUILT_IN, FILE_ENDINGS, file_problem, split_of
from torchtitan.rollout.environments.agent_worker import FUNCTION
from torchtitan.rollout.rewards import BUILTIN
from torchtitan.rollout.workers.isolation import find_isolation
from torchtitan.utils.definitions import is_installed
from torchtitan.utils.ranks import local_rank, world_size

Config = str | PathLike[str] | Mapping[str, Any] | JobConfig
"""A TOML file, its tables, or a configuration"""
# A cap on the importance ratio above this value does not count as a bound.
NO_BOUND = 10.0
OWN_ARGUMENTS = {
    "grpo.loss_type": (("log_probs", "log_ratio", "advantages", "options"), "sequences"),
    "grpo.advantage": (("rewards", "tokens"), ""),
    "grpo.off_policy_correction": (("ratio", "options"), "sequences"),
    "grpo.group_filter": (("group",), ""),
    "rollout.sampler": (("means", "variances", "groups", "typical"), ""),
}
"""Keys that may name a function of the user's that this program calls -> its arguments, and one that it may take"""
MODEL, TEACHER = "model.hf_assets_path", "distill.teacher"


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
    common = set[str].intersection(*({problem.text for problem in problems} for _, problems in found))
    check.problems += [problem for problem in found[0][1] if problem.text in common]
    for name, problems in found:
        for problem in problems:
            if problem.text not in common:
                check.problems.append(Problem(problem.key, f"source {name}: {problem.text}"))
    texts = {problem.text for _, problems in found for problem in problems}
    for name, set_config in eval_configs(config) if config.eval.set else []:
        problems = _validate_source(set_config, planning, wrong, SET_RULES)
        for problem in problems:
            if problem.text not in texts:
                check.problems.append(Problem(problem.key, f"[[eval.set]] {name}: {problem.text}"))
    return check.problems


def _validate_source(
    config: JobConfig, planning: bool, wrong: frozenset[str], only: Sequence[Callable[[Check], None]] = ()
) -> list[Problem]:
    check = Check(config, world_size(), planning, wrong)
    for rules in only or (
        check_stage, _check_device, _check_parallelism, _check_batch, _check_optimizer, _check_lengths,
        _check_objective, check_lora, _check_rollout, _check_rewards, _check_environment, check_inference,
        check_weight_sync, _check_evaluation, _check_files, check_model,
    ):  # fmt: skip
        rules(check)
    return check.problems


def _check_device(check: Check) -> None:
    if problem := device_problem():
        check.say("", problem)


def _check_parallelism(check: Check) -> None:
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


def _check_batch(check: Check) -> None:
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


def _check_optimizer(check: Check) -> None:
    name = check.config.optimizer.name
    missing = name == "AdamW8bit" and not is_installed("bitsandbytes") and not check.planning
    text = "needs the package bitsandbytes: EXTRAS=bitsandbytes in front of ./run_grpo.sh installs it"
    check.refuse("optimizer.name", missing, text)


def _check_lengths(check: Check) -> None:
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


def _check_objective(check: Check) -> None:
    grpo, refuse = check.config.grpo, check.refuse
    for key in ("loss_type", "advantage", "off_policy_correction", "group_filter"):
        name = getattr(grpo, key)
        is_own = name and (":" in name or key == "group_filter")
        if is_own and (problem := _own_function_problem(name, f"grpo.{key}")):
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


def _own_function_problem(name: str, key: str) -> str | None:
    """Return why a function of the user's cannot be what this key needs; None if it can."""
    return name_problem(name, "function") or function_problem(name, "function", *OWN_ARGUMENTS[key])


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


def _check_rollout(check: Check) -> None:
    config, rollout, evaluation = check.config, check.config.rollout, check.config.eval
    if not rollout.replay:
        _check_dataset(check, "rollout.dataset", rollout.dataset)
        key, sampled = sampled_dataset(config)
        columns = peek_columns(sampled)
        without = columns is not None and rollout.prompt_column not in columns
        there = ", ".join(sorted(columns or ()))
        text = f"{key} = {show(sampled)} has no such column; there are {there}"
        check.refuse("rollout.prompt_column", without, text)
    if evaluation.dataset:
        _check_dataset(check, "eval.dataset", evaluation.dataset)
        text = "must not be the prompts of training (rollout.dataset, same split)"
        check.refuse("eval.dataset", evaluation.is_used and _evaluates_training_data(config), text)
    text = "needs rewards to learn from, which this job.stage does not have"
    check.refuse("rollout.sampler", rollout.draws_by_results and not learns_from_rewards(config), text)
    if ":" in rollout.sampler and (problem := _own_function_problem(rollout.sampler, "rollout.sampler")):
        check.say("rollout.sampler", f"rollout.sampler: {problem}")
    untemplated = rollout.system_prompt and not rollout.chat_template
    check.refuse("rollout.system_prompt", untemplated, "needs rollout.chat_template = true")


def _evaluates_training_data(config: JobConfig) -> bool:
    rollout, evaluation = config.rollout, config.eval
    # An environment may have only a few initial states, and none of them reveals an answer.
    if rollout.replay or config.environment.is_used:
        return False
    is_file = rollout.dataset.endswith(FILE_ENDINGS)
    if is_file:
        return os.path.realpath(rollout.dataset) == os.path.realpath(evaluation.dataset)
    if rollout.dataset in BUILT_IN or FUNCTION.fullmatch(rollout.dataset):
        return rollout.dataset == evaluation.dataset
    return split_of(rollout.dataset, "train") == split_of(evaluation.dataset, "test")


def _check_dataset(check: Check, key: str, name: str) -> None:
    what = f"must be {', '.join(BUILT_IN)}, a .jsonl or .parquet file, `package.module:function` or a Hugging Face name"
    path = Path(name)
    if name in BUILT_IN:
        return
    if FUNCTION.fullmatch(name):
        if problem := name_problem(name, "dataset") or function_problem(name, "dataset", ()):
            check.refuse(key, True, problem)
    elif problem := file_problem(name):
        check.refuse(key, True, problem)
    elif name.endswith(FILE_ENDINGS):
        if not path.is_file():
            found = [other.name for other in path.parent.glob("*") if other.name.endswith(FILE_ENDINGS)]
            check.refuse(key, True, f"no such file (looked in {Path.cwd()}){nearest(path.name, found)}")
        elif path.suffix == ".parquet" and not is_installed("pyarrow"):
            check.refuse(key, True, "a .parquet file needs pyarrow: EXTRAS=data in front of ./run_grpo.sh installs it")
    elif "/" not in name or path.exists() or name.startswith((".", "/", "~")):
        check.refuse(key, True, f"{what} such as openai/gsm8k{nearest(name, BUILT_IN)}")
    elif not is_installed("datasets") and not check.planning:
        text = f"{what}, which needs the package datasets: EXTRAS=data in front of ./run_grpo.sh installs it"
        text += nearest(name, BUILT_IN)
        check.refuse(key, True, text)


def _check_rewards(check: Check) -> None:
    rewards, evaluation = check.config.rewards, check.config.eval
    key, functions = "rewards.functions", rewards.functions
    text = f"must name at least one of {', '.join(BUILTIN)} (or set environment.factory, which gives a reward)"
    needed = learns_from_rewards(check.config) and not check.config.environment.reward_name
    check.refuse(key, not functions and needed, text)
    is_used, dataset = check.config.environment.is_used, check.config.rollout.dataset
    # Of a set with prompts of its own, only the function that judges them is called.
    is_called = any(":" in name for name in functions) and sampled_dataset(check.config)[1] == dataset
    columns = _columns(check, dataset) if is_called else None
    for name in functions:
        if problem := reward_problem(name) or reward_call_problem(name, columns, is_used):
            check.say(key, f"{key}: {problem}")
    text = f"must be empty, or have one weight for each of {key} = {show(functions)}"
    check.refuse("rewards.weights", rewards.weights and len(rewards.weights) != len(functions), text)
    _check_isolation(check, "rewards.sandbox", rewards.sandbox)
    judge = evaluation.reward_function if evaluation.is_used else ""
    if judge not in ("", check.config.environment.reward_name, *functions):
        columns = _columns(check, evaluation.dataset or dataset)
        if problem := reward_problem(judge) or reward_call_problem(judge, columns, is_used):
            check.say("eval.reward_function", f"eval.reward_function: {problem}")


def _columns(check: Check, dataset: str) -> set[str] | None:
    """The columns that functions get of a dataset, where they can be told without loading it."""
    refused = {"rollout.dataset", "rollout.prompt_column", "rewards.answer_column"} & check.wrong
    columns = None if refused or check.config.rollout.replay else peek_columns(dataset, of_all_rows=True)
    return columns and columns_for_rewards(check.config, columns)


def _check_isolation(check: Check, name: str, sandbox: Sandbox) -> None:
    if not check.planning:
        try:
            find_isolation(sandbox.isolate, sandbox.network)
        except UserError as error:
            check.refuse(f"{name}.isolate", True, str(error))
        missing = [variable for variable in sandbox.variables if variable not in os.environ]
        check.refuse(f"{name}.variables", missing, f"there is no environment variable {', '.join(missing)}")
        absent = [path for path in sandbox.readable if not Path(path).expanduser().exists()]
        check.refuse(f"{name}.readable", absent, f"there is no file or folder {', '.join(absent)}")


def _check_environment(check: Check) -> None:
    environment = check.config.environment
    _check_isolation(check, "environment.sandbox", environment.sandbox)
    elsewhere = environment.verifiers.id and environment.verifiers.runtime["type"] != "subprocess"
    text = "must be false: the runtime of environment.verifiers needs its server and its keys"
    check.refuse("environment.sandbox.isolate", elsewhere and environment.sandbox.isolate is not False, text)
    parser, known_parsers = environment.tool_parser, (AUTO, *FORMATS)
    named = [("factory", "environment", environment.factory)]
    if problem := name_problem(parser, "tool parser", known_parsers):
        check.say("environment.tool_parser", f"environment.tool_parser: {problem}")
    if FUNCTION.fullmatch(environment.agent):
        named.append(("agent", "agent", environment.agent))
    elif environment.agent:
        try:
            program = next(iter(shlex.split(environment.agent)), "")
        except ValueError as error:
            check.refuse("environment.agent", True, f"it cannot be split into words as a shell does: {error}")
        else:
            check.refuse("environment.agent", shutil.which(program) is None, f"there is no program {program!r} here")
    programs = {"agent": environment.agent, "verifiers.id": environment.verifiers.id}
    kinds = [name for name, program in programs.items() if program]
    others = bool(environment.factory or environment.tools)
    for kind in kinds:
        alone = "cannot be combined with environment.factory, environment.tools or another kind of environment"
        check.refuse(f"environment.{kind}", others or len(kinds) > 1, alone)
    for key, what, name in (*named, *(("tools", "tool", name) for name in environment.tools)):
        if name and (problem := name_problem(name, what) or _use_problem(check, key, name)):
            check.say(f"environment.{key}", f"environment.{key}: {problem}")
    url, host = environment.gateway.url, environment.gateway.host.strip()
    text = "says not where programs reach the gateway: set environment.gateway.url, or one address of this machine"
    check.refuse("environment.gateway.host", host in ("", "0.0.0.0", "::") and not url, text)
    without = parser != AUTO and not check.config.environment.is_used
    check.refuse(
        "environment.tool_parser", without, "needs environment.tools, environment.factory or environment.agent"
    )
    text = "verifiers reads calls itself (environment.verifiers.renderer)"
    check.refuse("environment.tool_parser", parser not in known_parsers and environment.verifiers.id, text)


def _use_problem(check: Check, key: str, name: str) -> str | None:
    """Return why something of the user's cannot be used as this key of [environment] means it; None if it can."""
    if key == "factory":
        columns = _columns(check, sampled_dataset(check.config)[1])
        return environment_call_problem(name, columns and columns | {check.config.rollout.prompt_column})
    return tool_problem(name) if key == "tools" else None


def _check_evaluation(check: Check) -> None:
    evaluation = check.config.eval
    if not evaluation.is_used:
        return
    nothing_left = not evaluation.dataset and check.config.rollout.held_out_fraction == 0
    text = "must be greater than 0 if eval.dataset is empty, or eval.num_prompts must be 0"
    check.refuse("rollout.held_out_fraction", nothing_left, text)


def _folder_problem(folder: Path) -> str:
    """Return why files cannot be written to this folder, which may be made first; empty if they can."""
    there = next((path for path in (folder, *folder.absolute().parents) if os.path.lexists(path)), Path("/"))
    if not there.is_dir():
        return f"must be a folder, or a path where one can be made: {there} is not a folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"must be a folder that can be written: {there.absolute()} cannot"
    return ""


SET_RULES = (_check_rollout, _check_rewards, _check_environment, _check_evaluation)


def _check_files(check: Check) -> None:
    """Check folders that are read or written."""
    config, refuse = check.config, check.refuse
    dump_folder = Path(config.job.dump_folder)
    if problem := _folder_problem(dump_folder):
        refuse("job.dump_folder", True, problem)
    replay, folder = config.rollout.replay, resumed_folder(config)
    missing = replay and not (Path(replay) / "journal.jsonl").is_file()
    refuse("rollout.replay", missing, "must be a run folder with a journal.jsonl")
    if replay and not missing:
        recorded = read_toml(str(Path(replay) / "config.toml"))[0].get("rollout", {}).get("temperature")
        # The trainer would score the samples at another temperature than they were sampled with.
        other = recorded is not None and recorded != config.rollout.temperature
        refuse("rollout.temperature", other, f"must be {recorded}, as of the samples of rollout.replay = {replay}")
    if folder is not None:
        checkpoints = folder / CHECKPOINTS
        if not any(checkpoints.glob("step-*")):
            what = f"there is no checkpoint in {checkpoints}"
            if not folder.is_dir():
                what = f"{folder} is a link to nothing" if folder.is_symlink() else f"there is no run folder {folder}"
            # A folder of thousands of runs takes long to look through.
            runs = [run for run in dump_folder.glob("*") if not run.is_symlink()]
            found = sorted(str(run) for run in runs if any((run / CHECKPOINTS).glob("step-*")))
            others = f"; runs with checkpoints: {', '.join(found[-5:]) or 'none in job.dump_folder'}"
            refuse("checkpoint.resume", True, what + others)
    no_wandb = "wandb" in config.metrics.loggers and not is_installed("wandb")
    text = "needs the package wandb: EXTRAS=wandb in front of ./run_grpo.sh installs it"
    refuse("metrics.loggers", no_wandb, text)
