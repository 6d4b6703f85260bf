"""What a configuration must satisfy as a whole. No torch here; nothing is started, only small files are read."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from torchtitan.config.derived import global_batch_size, sleeps_between_batches, world_size
from torchtitan.config.fields import Problem, nearest, show
from torchtitan.config.job_config import JobConfig
from torchtitan.config.ranges import NAMES, OWN_FUNCTIONS, RANGES
from torchtitan.preflight.inference import check_inference
from torchtitan.preflight.lora import check_lora
from torchtitan.preflight.model import check_model
from torchtitan.preflight.reward_names import reward_problem
from torchtitan.rollout.rewards import BUILTIN
from torchtitan.weight_sync.faults import Fault, FaultError
from torchtitan.weight_sync.transports import IN_TRAINER

FILE_ENDINGS = (".jsonl", ".parquet")


def validate(config: JobConfig, planning: bool = False) -> list[Problem]:
    """All problems of `config` for world_size() ranks; empty where there are none.

    With `planning` nothing will be trained: a shape from model.flavor is enough, without checkpoint files.
    """
    values = list(_check_values(config))
    wrong = {problem.key for problem in values}
    ranks = world_size()
    combinations = [
        *_check_parallelism(config, ranks, wrong),
        *_check_batch(config, ranks, wrong),
        *_check_lengths(config),
        *_check_objective(config),
        *check_lora(config, planning),
        *_check_rollout(config, planning),
        *_check_rewards(config),
        *check_inference(config, ranks, planning),
        *_check_weight_sync(config, ranks),
        *_check_faults(config, ranks),
        *_check_evaluation(config),
        *_check_files(config),
        *check_model(config, planning),
    ]
    return values + [problem for problem in combinations if not problem.follows_from(wrong)]


def get(config: JobConfig, key: str) -> object:
    """The value of `table.key`."""
    table, _, name = key.partition(".")
    return getattr(getattr(config, table), name)


def refuse(config: JobConfig, key: str, allowed: str) -> Problem:
    """The problem of a key, with its value and what is allowed."""
    return Problem(key, f"{key} = {show(get(config, key))} is not allowed: {allowed}")


def _check_values(config: JobConfig) -> Iterator[Problem]:
    """Every value by itself: numbers in their range, names among the known."""
    for key, allowed in RANGES.items():
        value = get(config, key)
        if isinstance(value, (int, float)) and value not in allowed:
            yield refuse(config, key, f"must be {allowed}" if math.isfinite(value) else f"must be finite, {allowed}")
    for key, names in NAMES.items():
        value = str(get(config, key))
        if key in OWN_FUNCTIONS and all(value.partition(":")):
            continue
        if value not in names:
            yield refuse(config, key, f"must be {' or '.join(names)}{nearest(value, names)}")
    for key in ("checkpoint.folder", "profiling.save_traces_folder", "metrics.save_tb_folder"):
        folder = Path(str(get(config, key)))
        if not folder.name or folder.is_absolute() or ".." in folder.parts:
            yield refuse(config, key, "must be a relative folder name, inside the run folder")
    if not re.fullmatch(r"[\w.+-]+", config.job.name) or config.job.name.startswith("."):
        yield refuse(config, "job.name", "must be made of letters, digits, `_`, `.`, `+` and `-` (it names a folder)")


def _check_parallelism(config: JobConfig, ranks: int, wrong: set[str]) -> Iterator[Problem]:
    parallelism = config.parallelism
    replicate, tensor = parallelism.data_parallel_replicate_degree, parallelism.tensor_parallel_degree
    shard = parallelism.data_parallel_shard_degree
    if any(key.startswith("parallelism.") for key in wrong):
        return
    started = f"{ranks} rank{'s' if ranks > 1 else ''} (NGPU)"
    if shard == -1:
        if ranks % (replicate * tensor):
            key = "parallelism.tensor_parallel_degree" if tensor > 1 else "parallelism.data_parallel_replicate_degree"
            text = f"data_parallel_replicate_degree {replicate} × tensor_parallel_degree {tensor} must divide {started}"
            yield refuse(config, key, text)
    elif replicate * shard * tensor != ranks:
        text = f"data_parallel_replicate_degree {replicate} × data_parallel_shard_degree {shard} × "
        text += f"tensor_parallel_degree {tensor} = {replicate * shard * tensor} must equal {started}"
        yield refuse(config, "parallelism.data_parallel_shard_degree", text)


def _check_batch(config: JobConfig, ranks: int, wrong: set[str]) -> Iterator[Problem]:
    training, grpo = config.training, config.grpo
    sizes = {"training.global_batch_size", "training.local_batch_size", "grpo.group_size", "grpo.num_minibatches"}
    if wrong & sizes or config.parallelism.tensor_parallel_degree < 1:
        return
    size = global_batch_size(config, ranks)
    if training.global_batch_size != -1:
        key, what = "training.global_batch_size", f"{size}"
    else:
        key = "training.local_batch_size"
        what = f"{size} completions per batch ({training.local_batch_size} × {size // training.local_batch_size} ranks)"
    if size % grpo.group_size:
        yield refuse(config, key, f"{what} must be divisible by grpo.group_size = {grpo.group_size}")
    elif (groups := size // grpo.group_size) % grpo.num_minibatches:
        text = f"must divide the {groups} groups of a batch ({what} / grpo.group_size = {grpo.group_size})"
        yield refuse(config, "grpo.num_minibatches", text)
    elif 0 < config.rollout.max_groups_in_flight < groups:
        text = f"must be 0, or at least the {groups} groups of one batch"
        yield refuse(config, "rollout.max_groups_in_flight", text)


def _check_lengths(config: JobConfig) -> Iterator[Problem]:
    training, rollout = config.training, config.rollout
    if rollout.max_completion_tokens >= training.seq_len:
        text = f"must be less than training.seq_len = {training.seq_len}, which holds prompt and completion"
        yield refuse(config, "rollout.max_completion_tokens", text)
    if training.tokens_per_micro_batch < training.seq_len:
        text = f"must be at least training.seq_len = {training.seq_len}: a sequence is never split"
        yield refuse(config, "training.tokens_per_micro_batch", text)
    if 0 < config.grpo.delta <= 1 + config.grpo.epsilon_high:
        text = f"must be 0 (off), or greater than 1 + grpo.epsilon_high = {1 + config.grpo.epsilon_high:g}"
        yield refuse(config, "grpo.delta", text)


# An importance ratio above this is no bound.
NO_BOUND = 10.0


def _bounds_ratio(config: JobConfig) -> bool:
    """Whether clip or correction bounds the weight of π/μ."""
    grpo = config.grpo
    if grpo.recompute_old_log_probs:
        # The clip acts on π/π_old; what lies between π_old and μ is the correction's.
        return grpo.off_policy_correction != "none"
    reach = {"cispo": grpo.cispo_cap, "reinforce": grpo.importance_cap, "sapo": 1.0}
    own = math.inf if ":" in grpo.loss_type else grpo.epsilon_high
    return reach.get(grpo.loss_type, own) < NO_BOUND or grpo.off_policy_correction in ("mask", "icepop")


def _check_objective(config: JobConfig) -> Iterator[Problem]:
    grpo = config.grpo
    if grpo.icepop_low >= grpo.icepop_high:
        yield refuse(config, "grpo.icepop_low", f"must be less than grpo.icepop_high = {grpo.icepop_high:g}")
    if grpo.entropy_top_share < 1 and not grpo.recompute_old_log_probs:
        yield refuse(
            config, "grpo.entropy_top_share", "needs grpo.recompute_old_log_probs = true, where entropies are known"
        )
    masks = (
        grpo.geometric_mask_low,
        grpo.geometric_mask_high,
        grpo.product_mask_low,
        grpo.product_mask_high,
        grpo.negative_mask_threshold,
    )
    if grpo.async_weight_update and not _bounds_ratio(config) and not any(masks) and not grpo.allow_uncorrected:
        text = "and nothing else bounds how far off policy a sample counts, but an asynchronous run trains on samples "
        text += (
            "of older policies: set a correction, a sequence mask or (without recompute_old_log_probs) a clip range "
        )
        text += f"below {NO_BOUND:g}, or grpo.allow_uncorrected = true"
        yield refuse(config, "grpo.off_policy_correction", text)
    if grpo.reward_aggregation == "normalize_each" and config.rewards.functions and len(config.rewards.functions) < 2:
        yield refuse(config, "grpo.reward_aggregation", "needs at least two of rewards.functions")


def _check_rollout(config: JobConfig, planning: bool) -> Iterator[Problem]:
    rollout = config.rollout
    if not rollout.replay:
        yield from _check_dataset(config, "rollout.dataset", planning)
    if config.eval.enable and config.eval.dataset:
        yield from _check_dataset(config, "eval.dataset", planning)
        if _evaluates_training_data(config):
            yield refuse(config, "eval.dataset", "must not be the prompts of training (rollout.dataset, same split)")
    if rollout.system_prompt and not rollout.chat_template:
        yield refuse(config, "rollout.system_prompt", "needs rollout.chat_template = true")
    for key in ("rollout.prompt_column", "rewards.answer_column"):
        if not get(config, key):
            yield refuse(config, key, "must name a column")


def _evaluates_training_data(config: JobConfig) -> bool:
    rollout, evaluation = config.rollout, config.eval
    if rollout.replay or rollout.dataset != evaluation.dataset:
        return False
    has_splits = rollout.dataset != "arithmetic" and not rollout.dataset.endswith(FILE_ENDINGS)
    return not has_splits or rollout.dataset_split == evaluation.dataset_split


def _check_dataset(config: JobConfig, key: str, planning: bool) -> Iterator[Problem]:
    name = str(get(config, key))
    what = "must be arithmetic, a .jsonl or .parquet file, or a Hugging Face dataset name"
    path = Path(name)
    if name == "arithmetic":
        return
    if not name:
        yield refuse(config, key, what)
    elif name.endswith(FILE_ENDINGS):
        if not path.is_file():
            found = [other.name for other in path.parent.glob("*") if other.name.endswith(FILE_ENDINGS)]
            yield refuse(config, key, f"no such file (looked in {Path.cwd()}){nearest(path.name, found)}")
        elif path.suffix == ".parquet" and find_spec("pyarrow") is None:
            yield refuse(config, key, "a .parquet file needs pyarrow: pip install 'torchtitan-grpo[data]'")
    elif path.exists() or name.startswith((".", "/", "~")):
        yield refuse(config, key, what)
    elif find_spec("datasets") is None and not planning:
        text = f"{what}, which needs an extra: pip install 'torchtitan-grpo[data]'{nearest(name, ['arithmetic'])}"
        yield refuse(config, key, text)


def _check_rewards(config: JobConfig) -> Iterator[Problem]:
    rewards = config.rewards
    if not rewards.functions:
        yield refuse(config, "rewards.functions", f"must name at least one of {', '.join(BUILTIN)}")
    for name in rewards.functions:
        if problem := reward_problem(name):
            yield Problem("rewards.functions", f"rewards.functions: {problem}")
    if len(set(rewards.functions)) < len(rewards.functions):
        yield refuse(config, "rewards.functions", "every function may be named once")
    if rewards.weights and len(rewards.weights) != len(rewards.functions):
        text = f"must be empty, or have one weight for each of rewards.functions = {show(rewards.functions)}"
        yield refuse(config, "rewards.weights", text)
    if not all(map(math.isfinite, rewards.weights)):
        yield refuse(config, "rewards.weights", "every weight must be a finite number")
    if config.eval.enable and config.eval.reward_function and (problem := reward_problem(config.eval.reward_function)):
        yield Problem("eval.reward_function", f"eval.reward_function: {problem}")


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _check_weight_sync(config: JobConfig, ranks: int) -> Iterator[Problem]:
    sync, limit = config.weight_sync, config.comm.train_timeout_seconds
    if not sync.host.strip() or _is_wildcard(sync.host):
        yield refuse(config, "weight_sync.host", "must be one address by which this machine is reached")
    if sync.transport != "tcp":
        for key, asked in (("delta", sync.delta), ("relay", sync.relay), ("streams", sync.streams > 1)):
            if asked:
                text = f"weight_sync.transport {sync.transport} does not have that, only tcp does"
                yield refuse(config, f"weight_sync.{key}", text)
    if config.training.enable_cpu_offload and sync.transport in IN_TRAINER:
        # Between parameters in host memory and actors on a GPU such a transport would never deliver anything.
        text = f"needs weight_sync.transport tcp or disk, {sync.transport} reads the parameters on their device"
        yield refuse(config, "training.enable_cpu_offload", text)
    if config.inference.update_mode == "drain" and sync.apply_timeout_s <= config.inference.drain_timeout_s:
        text = f"must be greater than inference.drain_timeout_s = {config.inference.drain_timeout_s:g}, which is in it"
        yield refuse(config, "weight_sync.apply_timeout_s", text)
    if sync.blocking_timeout_s < sync.apply_timeout_s:
        text = f"must be at least weight_sync.apply_timeout_s = {sync.apply_timeout_s:g}"
        yield refuse(config, "weight_sync.blocking_timeout_s", text)
    if ranks > 1 and not config.grpo.async_weight_update and sync.blocking_timeout_s >= limit:
        text = f"must be less than comm.train_timeout_seconds = {limit}: the other ranks sit in a collective meanwhile"
        yield refuse(config, "weight_sync.blocking_timeout_s", text)
    elif ranks > 1 and sleeps_between_batches(config):
        # A quarter is what the next order may take.
        most = 0.75 * limit
        if config.inference.sleep_timeout_s + max(sync.blocking_timeout_s, config.inference.drain_timeout_s) >= most:
            text = "this with weight_sync.blocking_timeout_s, and with inference.drain_timeout_s, must be less than "
            text += f"three quarters of comm.train_timeout_seconds = {limit}: other ranks sit in a collective meanwhile"
            yield refuse(config, "inference.sleep_timeout_s", text)


def _check_faults(config: JobConfig, ranks: int) -> Iterator[Problem]:
    key = "fault_injection.faults"
    faults = []
    for text in config.fault_injection.faults:
        try:
            faults.append(Fault.parse(text))
        except FaultError as error:
            yield Problem(key, f"{key}: {error}")
    if config.fault_injection.enable and not config.fault_injection.faults:
        yield refuse(config, key, "must name at least one fault where fault_injection.enable = true")
    actors = [f"actor-{number}" for number in range(len(config.inference.servers) or config.inference.num_actors)]
    for fault in faults:
        if fault.actor is not None and fault.actor not in actors:
            yield Problem(key, f"{key}: {fault.text!r}: there is no such actor, only {', '.join(actors)}")
        if fault.rank is not None and not 0 <= fault.rank < ranks:
            yield Problem(key, f"{key}: {fault.text!r}: there is no such rank among {ranks}")
        if fault.phase == "write" and config.weight_sync.transport != "disk":
            yield Problem(key, f"{key}: {fault.text!r}: phase write needs weight_sync.transport = disk")
        if fault.phase == "relay" and not config.weight_sync.relay:
            yield Problem(key, f"{key}: {fault.text!r}: phase relay needs weight_sync.relay = true")


def _check_evaluation(config: JobConfig) -> Iterator[Problem]:
    evaluation = config.eval
    if not evaluation.enable:
        return
    if not evaluation.pass_at_k:
        yield refuse(config, "eval.pass_at_k", "must name at least one k")
    if any(not 1 <= k <= evaluation.samples_per_prompt for k in evaluation.pass_at_k):
        text = f"every k must be 1 to eval.samples_per_prompt = {evaluation.samples_per_prompt}"
        yield refuse(config, "eval.pass_at_k", text)
    if not evaluation.dataset and config.rollout.held_out_fraction == 0:
        text = "must be greater than 0 where eval.enable = true and no eval.dataset is named"
        yield refuse(config, "rollout.held_out_fraction", text)


def _check_files(config: JobConfig) -> Iterator[Problem]:
    """Folders that are read or written."""
    dump_folder = Path(config.job.dump_folder)
    if not config.job.dump_folder or (dump_folder.exists() and not dump_folder.is_dir()):
        yield refuse(config, "job.dump_folder", "must be a folder, or a path where one can be made")
    if config.rollout.replay and not (Path(config.rollout.replay) / "journal.jsonl").is_file():
        yield refuse(config, "rollout.replay", "must be a run folder with a journal.jsonl")
    resume = config.checkpoint.resume
    if resume:
        folder = dump_folder / "latest" if resume == "latest" else Path(resume)
        if not folder.is_dir():
            yield refuse(config, "checkpoint.resume", f"there is no run folder {folder}")
        elif not any((folder / config.checkpoint.folder).glob("step-*")):
            yield refuse(config, "checkpoint.resume", f"there is no checkpoint in {folder / config.checkpoint.folder}")
    elif config.checkpoint.load_step != -1:
        yield refuse(config, "checkpoint.load_step", "needs checkpoint.resume")
    if config.metrics.enable_wandb and find_spec("wandb") is None:
        yield refuse(config, "metrics.enable_wandb", "needs an extra: pip install 'torchtitan-grpo[wandb]'")
