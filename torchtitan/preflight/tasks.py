"""Rules for what is sampled and how it is judged: datasets, rewards, environments and evaluations."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

from torchtitan.config.evaluations import sampled_dataset
from torchtitan.config.job_config import JobConfig
from torchtitan.config.reward_names import learns_from_rewards
from torchtitan.config.rollout_tables import Sandbox
from torchtitan.config.values import show
from torchtitan.errors import UserError, nearest
from torchtitan.preflight.check import Check, name_problem, own_function_problem, reward_problem
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


def check_rollout(check: Check) -> None:
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
    if ":" in rollout.sampler and (problem := own_function_problem(rollout.sampler, "rollout.sampler")):
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


def check_rewards(check: Check) -> None:
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


def check_environment(check: Check) -> None:
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


def check_evaluation(check: Check) -> None:
    evaluation = check.config.eval
    if not evaluation.is_used:
        return
    nothing_left = not evaluation.dataset and check.config.rollout.held_out_fraction == 0
    text = "must be greater than 0 if eval.dataset is empty, or eval.num_prompts must be 0"
    check.refuse("rollout.held_out_fraction", nothing_left, text)
