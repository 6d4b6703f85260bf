"""Configuration: what is read, what is refused and how, and what the plan says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.patience import PATIENCE_S
from torchtitan.config import device_defaults
from torchtitan.config.derived import verification
from torchtitan.config.draft import OLD_NAMES, Draft
from torchtitan.config.engine_args import command_line
from torchtitan.config.job_config import JobConfig, known_keys
from torchtitan.config.reference import markdown
from torchtitan.config.servers import nodes, slurm_urls
from torchtitan.config.tables.grpo import LOSS_TYPES
from torchtitan.config.toml import config_to_toml
from torchtitan.config.values import Names, Range
from torchtitan.errors import ConfigError
from torchtitan.grpo.loss_settings import loss_settings
from torchtitan.grpo.objectives import ClipRange
from torchtitan.models.model_args import ModelArgs
from torchtitan.preflight import plan
from torchtitan.preflight.__main__ import main
from torchtitan.preflight.inference import ROUTES
from torchtitan.preflight.loading import load_config, validated
from torchtitan.preflight.plan import describe_plan, make_plan

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[3]

SHAPE = ModelArgs(
    family="qwen3",
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    tie_word_embeddings=True,
    max_position_embeddings=128,
)

GOOD = """
[model]
hf_assets_path = "checkpoint"
[training]
steps = 7
global_batch_size = 32
seq_len = 64
tokens_per_micro_batch = 256
[grpo]
group_size = 8
num_minibatches = 2
[rollout]
max_completion_tokens = 32
"""

WriteConfig = Callable[..., list[str]]


@pytest.fixture
def write_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteConfig:
    """Write job.toml (the good one, or `text`, plus `more`) beside a checkpoint directory; returns the arguments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(SHAPE.to_hf_config()))
    (checkpoint / "tokenizer.json").write_text("{}")
    (checkpoint / "model.safetensors").write_bytes(b"")

    def write(text: str = GOOD, more: str = "") -> list[str]:
        (tmp_path / "job.toml").write_text(text + more, encoding="utf-8")
        return ["--job.config_file", "job.toml"]

    return write


def test_file_then_command_line_then_defaults(write_config: WriteConfig) -> None:
    arguments = write_config()
    config = load_config(arguments)
    assert (config.training.steps, config.grpo.group_size, config.rollout.max_staleness) == (7, 8, 2)
    assert config.job.config_file == "job.toml"
    overrides = ["--training.steps", "3", "--optimizer.lr=1e-3", "--eval.pass_at_k", "1", "2", "4", "--job.name", "x-1"]
    overrides += [
        "--rewards.functions",
        "accuracy",
        "format",
        "--rewards.weights",
        "1",
        "-0.5",
        "--training.max_norm",
        "2",
    ]
    config = load_config([*overrides, *arguments])
    assert (config.training.steps, config.optimizer.lr, config.job.name) == (3, 1e-3, "x-1")
    assert config.eval.pass_at_k == [1, 2, 4]
    assert (config.rewards.functions, config.rewards.weights) == (["accuracy", "format"], [1.0, -0.5])
    assert isinstance(config.training.max_norm, float)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--grpo.async_weight_update", "false"], False),
        (["--grpo.async_weight_update=false"], False),
        (["--grpo.async-weight-update=False"], False),
        (["--grpo.no-async_weight_update"], False),
        (["--grpo.no_async_weight_update", "--training.steps", "2"], False),
        (["--grpo.async_weight_update"], True),
        (["--grpo.async_weight_update", "true"], True),
        (["--grpo.async_weight_update=false", "--grpo.async_weight_update=true"], True),
    ],
)
def test_booleans(write_config: WriteConfig, words: list[str], expected: bool) -> None:
    assert load_config([*write_config(), *words]).grpo.async_weight_update is expected


def test_negative_and_odd_values_pass_through(write_config: WriteConfig) -> None:
    words = ["--training.global_batch_size", "-1", "--training.local_batch_size", "16", "--job.description=--x = 'y'"]
    config = load_config([*write_config(), *words])
    assert config.training.global_batch_size == -1
    assert config.job.description == "--x = 'y'"


def test_dry_run_and_help(write_config: WriteConfig, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = write_config()
    assert main(["--dry_run", *arguments]) == 0
    printed = capsys.readouterr().out
    # What it prints is itself the configuration.
    assert tomllib.loads(printed) == asdict(load_config(arguments))
    with pytest.raises(SystemExit) as exit_info:
        main(["--help"])
    assert exit_info.value.code == 0
    assert "--weight_sync.num_slots INT" in capsys.readouterr().out


# (id, text appended to the good file or whole file, words of the command line, what the message must contain)
BAD: list[tuple[str, str, list[str], list[str]]] = [
    ("unknown table", "[grop]\nx = 1\n", [], ["unknown table [grop]", "nearest: grpo"]),
    ("key outside a table", "training_steps = 3\n" + GOOD, [], ["training_steps"]),
    (
        "unknown key",
        "[weight_sync]\nnum_slot = 3\n",
        [],
        ["num_slot = 3", "nearest: weight_sync.num_slots"],
    ),
    ("key of another table", "[inference]\ngroup_size = 3\n", [], ["inference.group_size", "nearest: grpo.group_size"]),
    ("table is a value", "compile = 3\n" + GOOD, [], ["compile = 3 must be a table"]),
    ("text for an integer", "[optimizer]\nlr = 'fast'\n", [], ['optimizer.lr = "fast"', "takes a number"]),
    ("boolean for an integer", "[weight_sync]\nnum_slots = true\n", [], ["num_slots = true", "takes an integer"]),
    ("float for an integer", "[weight_sync]\nnum_slots = 3.0\n", [], ["num_slots = 3.0", "takes an integer"]),
    ("integer for a boolean", "[eval]\nenable = 1\n", [], ["eval.enable = 1", "true or false"]),
    ("scalar for a list", "[rewards]\nfunctions = 'accuracy'\n", [], ["rewards.functions", "a list"]),
    ("wrong element", "[eval]\npass_at_k = [1, 'x']\n", [], ["eval.pass_at_k", "each element an integer"]),
    ("wrong choice", "[compile]\n[lr_scheduler]\ndecay_type = 'cosin'\n", [], ['"cosin"', "linear", "nearest: cosine"]),
    ("broken TOML", "[eval\n", [], ["job.toml", "not valid TOML", "line 14"]),
    ("missing config file", "", ["--job.config_file", "jb.toml"], ['"jb.toml" does not exist', "nearest: job.toml"]),
    ("config file is a folder", "", ["--job.config_file", "checkpoint"], ["checkpoint", "cannot be read"]),
    ("unknown option", "", ["--grpo.group_sise", "4"], ["--grpo.group_sise", "nearest: grpo.group_size"]),
    ("a flag with a value", "", ["--grpo.no_async_weight_update", "x"], ["'x' belongs to no", "takes no value"]),
    ("unknown option, no table", "", ["--dry-rum"], ["--dry_rum", "nearest: dry_run"]),
    ("stray word", "", [], ["'oops' belongs to no"]),
    ("override of a wrong type", "", ["--training.steps", "many"], ["training.steps = many", "takes an integer"]),
    ("override without a value", "", ["--training.steps"], ["training.steps = (no value)", "takes an integer"]),
    ("too many values", "", ["--training.steps", "1", "2"], ["training.steps = 1 2", "takes an integer"]),
    ("override out of choices", "", ["--model.name", "qwen4"], ["model.name = qwen4", "llama3", "nearest: qwen"]),
    ("boolean override", "", ["--eval.enable", "maybe"], ["eval.enable = maybe", "true or false"]),
    ("group size 1", "", ["--grpo.group_size", "1"], ["grpo.group_size = 1", "at least 2"]),
    ("batch and group", "", ["--grpo.group_size", "5"], ["global_batch_size = 32", "divisible by grpo.group_size = 5"]),
    (
        "local batch and group",
        "",
        ["--training.global_batch_size=-1", "--training.local_batch_size", "12"],
        ["training.local_batch_size = 12", "divisible by grpo.group_size = 8"],
    ),
    ("minibatches", "", ["--grpo.num_minibatches", "3"], ["grpo.num_minibatches = 3", "4 groups"]),
    ("batch of nothing", "", ["--training.global_batch_size", "0"], ["global_batch_size = 0", "-1, or at least 1"]),
    ("one slot", "", ["--weight_sync.num_slots", "1"], ["weight_sync.num_slots = 1", "at least 3"]),
    (
        "objective",
        "",
        ["--grpo.loss_type", "dap"],
        ['grpo.loss_type = "dap"', "dr_grpo", "nearest: dapo"],
    ),
    ("engine", "", ["--inference.backend", "embeded"], ['"embeded"', "nearest: embedded"]),
    ("transport", "", ["--weight_sync.transport", "udp"], ['weight_sync.transport = "udp"', "tcp"]),
    *(
        (
            f"{key}, no tcp",
            f'[weight_sync]\ntransport = "disk"\n{key} = {value}\n',
            [],
            [f"{key} = {value}", "only tcp"],
        )
        for key, value in (("delta", "true"), ("relay", "true"))
    ),
    *(
        (
            f"offload with {transport}",
            f'[weight_sync]\ntransport = "{transport}"\n',
            ["--training.enable_cpu_offload"],
            ["enable_cpu_offload = true", "weight_sync.transport tcp or disk"],
        )
        for transport in ("nccl", "ipc")
    ),
    ("mode", "", ["--inference.mode", "servers"], ["inference.mode = servers", "colocate", "nearest: server"]),
    ("mode of this engine", "", ["--inference.mode", "colocate"], ['inference.mode = "colocate"', "server only"]),
    *(
        (f"{words[0]} of the embedded engine", "", [f"--{key}", *words[1:]], [".".join(key.split(".")[:2]), part])
        for key, part, *words in (
            ("inference.tensor_parallel_size", "needs inference.backend vllm or sglang", "tensor parallel", "2"),
            ("inference.engine_args.max-model-len", "needs inference.backend vllm or sglang", "options", "8"),
            ("inference.engine_python", "needs inference.backend vllm or sglang", "Python", "/usr/bin/python3"),
            ("inference.engine_memory_gb", "needs inference.backend vllm or sglang", "cache", "2"),
            ("weight_sync.route", "with inference.backend embedded it is auto", "route", "agent"),
            ("inference.sleep_level", "needs grpo.async_weight_update = false", "sleep", "1"),
            ("inference.offload_optimizer", "needs inference.mode = colocate", "offload", "true"),
        )
    ),
    *(
        (f"{name} with {engine}", f'[inference]\nbackend = "{engine}"\n', words, parts)
        for engine, name, words, parts in (
            (
                "sglang",
                "direct",
                ["--weight_sync.route", "direct"],
                ['route = "direct"', "it is auto or agent"],
            ),
            ("sglang", "colocate", ["--inference.mode", "colocate"], ['mode = "colocate"', "colocate is for vllm"]),
            ("sglang", "drain", ["--inference.update_mode", "drain"], ['update_mode = "drain"', "end first"]),
            ("vllm", "digest", ["--weight_sync.verify", "digest"], ['verify = "digest"', "take probe"]),
            ("vllm", "exact", ["--inference.exact"], ["inference.exact = true", "backend = embedded"]),
            ("vllm", "no Python", ["--inference.engine_python", "/no/python"], ['"/no/python"', "no such file"]),
            ("vllm", "our option", ["--inference.engine_args.tp", "2"], ["tp = 2", "inference.tensor_parallel_size"]),
            ("vllm", "no option", ["--inference.engine_args.=2"], ["an option's name"]),
            ("vllm", "nothing launched", ["--inference.launch", "false"], ["launch = false", "inference.servers"]),
            (
                "vllm",
                "colocate and servers",
                ["--inference.mode", "colocate", "--inference.servers", "http://127.0.0.1:1"],
                ["inference.servers", "must be empty"],
            ),
            (
                "vllm",
                "colocate and tensor parallel",
                ["--inference.mode", "colocate", "--inference.tensor_parallel_size", "2"],
                ["tensor_parallel_size = 2", "must divide the 1 rank (NGPU)"],
            ),
            (
                "vllm",
                "colocate and a route",
                ["--inference.mode", "colocate", "--weight_sync.route", "direct"],
                ['weight_sync.route = "direct"', "stay in the process"],
            ),
            (
                "vllm",
                "colocate and offload twice",
                [
                    *("--inference.mode", "colocate", "--inference.offload_optimizer"),
                    "--training.enable_cpu_offload",
                ],
                ["offload_optimizer = true", "already"],
            ),
        )
    ),
    (
        "one option twice",
        '[inference]\nbackend = "vllm"\n[inference.engine_args]\nmax-model-len = 8\nmax_model_len = 9\n',
        [],
        ["max_model_len = 9", "same option as max-model-len"],
    ),
    ("options without a name", "", ["--inference.engine_args", "x"], ["--inference.engine_args.NAME VALUE"]),
    (
        "a date as an option",
        '[inference]\nbackend = "vllm"\n[inference.engine_args]\nseed = 2026-01-01\n',
        [],
        ["inference.engine_args", "takes a table"],
    ),
    ("template", "", ["--rollout.chat_template_kwargs.tools", "[]"], ["chat_template_kwargs", "must not have tools"]),
    ("server twice", "", ["--inference.servers", "http://localhost:1", "http://localhost:1"], ["named once"]),
    ("Slurm without a port", "", ["--inference.servers", "slurm:gpu[1-2]"], ["slurm:gpu[1-2]", "slurm:NODES:PORT"]),
    ("Slurm nodes backwards", "", ["--inference.servers", "slurm:gpu[3-2]:80"], ["3 to 2 is no range"]),
    ("Slurm port", "", ["--inference.servers", "slurm:gpu1:70000"], ["70000 is no port"]),
    ("reward", "", ["--rewards.functions", "acuracy"], ['"acuracy"', "package.module:function", "nearest: accuracy"]),
    ("reward path", "", ["--rewards.functions", "my module:f"], ['"my module:f"', "package.module:function"]),
    ("rewards twice", "", ["--rewards.functions", "format", "format"], ["rewards.functions", "once"]),
    ("no rewards", "", ["--rewards.functions"], ["rewards.functions = []", "at least one"]),
    ("reward weights", "", ["--rewards.weights", "1", "2"], ["rewards.weights = [1.0, 2.0]", "one weight for each"]),
    ("agent", "", ["--environment.agent", "tests.agent_examples:pley"], ["environment.agent", "nearest: play"]),
    ("agent's command", "", ["--environment.agent", "no-such-program x"], ["environment.agent", "no-such-program"]),
    (
        "two kinds of environment",
        "",
        ["--environment.agent", "tests.agent_examples:play", "--environment.tools", "tests.agent_examples:raises"],
        ["environment.agent", "excludes"],
    ),
    ("reward of evaluation", "", ["--eval.reward_function", "acc"], ["eval.reward_function", '"acc"']),
    ("staleness", "", ["--rollout.max_staleness", "9"], ["rollout.max_staleness = 9", "0 to 8"]),
    ("temperature 0", "", ["--rollout.temperature", "0"], ["rollout.temperature = 0.0", "greater than 0"]),
    ("not a number", "", ["--rollout.temperature", "nan"], ["rollout.temperature = nan", "finite, greater than 0"]),
    ("infinite", "[weight_sync]\napply_timeout_s = inf\n", [], ["weight_sync.apply_timeout_s = inf"]),
    ("adapters that do not count", "", ["--lora.alpha", "0"], ["lora.alpha = 0.0", "greater than 0"]),
    ("top-p", "", ["--rollout.top_p", "0"], ["rollout.top_p = 0.0", "greater than 0 and at most 1"]),
    ("min-p", "", ["--rollout.min_p", "1"], ["rollout.min_p = 1.0", "at least 0 and less than 1"]),
    ("completion fills the sequence", "", ["--training.seq_len", "32"], ["max_completion_tokens = 32", "seq_len = 32"]),
    ("micro-batch", "", ["--training.tokens_per_micro_batch", "63"], ["tokens_per_micro_batch = 63", "seq_len = 64"]),
    ("longer than positions", "", ["--training.seq_len", "129"], ["training.seq_len = 129", "= 128"]),
    ("stop token", "", ["--rollout.stop_token_ids", "3", "50"], ["rollout.stop_token_ids", "[50]", "0 to 49"]),
    ("two-sided clip", "", ["--grpo.delta", "1.1"], ["grpo.delta = 1.1", "1.28"]),
    *(
        (f"no bound of {what}", "", words.split(), [f"grpo.{key} ", "off-policy token", "allow_uncorrected = true"])
        for what, words, key in (
            ("the ratio of negative advantages", "--grpo.delta 0", "delta"),
            ("a token by a mask of sequences", "--grpo.delta 0 --grpo.geometric_mask_high 2", "delta"),
            ("cispo", "--grpo.loss_type cispo --grpo.cispo_cap 50", "cispo_cap"),
            ("an own loss", "--grpo.loss_type tests.unit_tests.grpo.test_objectives:own_loss", "loss_type"),
            (
                "an own loss, decoupled",
                "--grpo.loss_type tests.unit_tests.grpo.test_objectives:own_loss --grpo.recompute_old_log_probs",
                "loss_type",
            ),
            (
                "the drift",
                "--grpo.recompute_old_log_probs --grpo.off_policy_correction none",
                "off_policy_correction",
            ),
            ("a step", "--grpo.recompute_old_log_probs --grpo.delta 0", "delta"),
        )
    ),
    (
        "k1 without its ratio",
        "",
        ["--grpo.kl_coefficient", "0.1", "--grpo.kl_estimator", "k1", "--grpo.no-kl_ratio_correction"],
        ['grpo.kl_estimator = "k1"', "mean zero"],
    ),
    ("pass@k", "", ["--eval.pass_at_k", "1", "5"], ["eval.pass_at_k = [1, 5]", "samples_per_prompt = 4"]),
    ("nothing held out", "", ["--rollout.held_out_fraction", "0"], ["held_out_fraction = 0.0", "eval.dataset"]),
    ("system prompt", "", ["--rollout.system_prompt", "Hi"], ['rollout.system_prompt = "Hi"', "chat_template = true"]),
    ("dataset file", "", ["--rollout.dataset", "x.jsonl"], ['rollout.dataset = "x.jsonl"', "no such file"]),
    ("evaluation file", "", ["--eval.dataset", "./e.jsonl"], ['eval.dataset = "./e.jsonl"', "no such file"]),
    ("evaluation on training prompts", "", ["--eval.dataset", "arithmetic"], ["eval.dataset", "prompts of training"]),
    ("dataset is a folder", "", ["--rollout.dataset", "checkpoint"], ["rollout.dataset", "arithmetic"]),
    ("server address", "", ["--inference.servers", "localhost"], ['"localhost"', "http://127.0.0.1:8000"]),
    ("server elsewhere", "", ["--inference.servers", "http://10.0.0.5:8000"], ["http://10.0.0.5:8000", "this machine"]),
    ("server by its name", "", ["--inference.servers", "https://node7"], ['"https://node7"', "this machine"]),
    ("replay", "", ["--rollout.replay", "runs/1"], ['rollout.replay = "runs/1"', "journal.jsonl"]),
    *(
        (f"stage: {key}", "", words.split(), [key, says])
        for words, key, says in (
            ("--job.stage sft --grpo.recompute_old_log_probs", "grpo.recompute_old_log_probs = true", "stage = sft"),
            ("--job.stage sft --rollout.temperature 0.7", "rollout.temperature = 0.7", "must be 1"),
            ("--sft.epochs 2", "sft.epochs = 2", "needs job.stage = sft"),
            ("--distill.teacher checkpoint", "distill.teacher", "needs job.stage = distill"),
            ("--job.stage distill", 'distill.teacher = ""', "checkpoint directory"),
            ("--job.stage distill --distill.teacher checkpoint --distill.teacher_url a:1", '"a:1"', "must be a URL"),
            ("--job.stage distill --distill.teacher nowhere", "distill.teacher", "no config.json"),
            (
                "--job.stage distill --distill.teacher checkpoint --grpo.kl_coefficient 1",
                "grpo.kl_coefficient",
                "place",
            ),
            ("--job.stage sft --eval.stop_at 0.5", "eval.stop_at = 0.5", "sft.sample = true"),
        )
    ),
    ("resume", "", ["--checkpoint.resume", "runs/1"], ['checkpoint.resume = "runs/1"', "no run folder"]),
    ("resume the latest", "", ["--checkpoint.resume", "latest"], ["outputs/latest"]),
    (
        "step without resume",
        "",
        ["--checkpoint.load_step", "3"],
        ["load_step = 3", "needs checkpoint.resume"],
    ),
    ("run folder", "", ["--job.dump_folder", "job.toml"], ['job.dump_folder = "job.toml"', "must be a folder"]),
    ("name with a slash", "", ["--job.name", "a/b"], ['job.name = "a/b"', "letters"]),
    ("folder outside the run", "", ["--checkpoint.folder", "../x"], ['checkpoint.folder = "../x"', "inside the run"]),
    ("missing checkpoint", "", ["--model.hf_assets_path", "chekpoint"], ["chekpoint", "nearest: checkpoint"]),
    ("no checkpoint named", "", ["--model.hf_assets_path", ""], ['model.hf_assets_path = ""', "config.json"]),
    ("other family", "", ["--model.name", "llama3"], ['model.name = "llama3"', "qwen3", "auto"]),
    ("flavor", "", ["--model.flavor", "0.6"], ['model.flavor = "0.6"', "nearest: 0.6B"]),
    (
        "debug checkpoint not made",
        "",
        ["--model.hf_assets_path", "assets/debug_arithmetic"],
        ["assets/debug_arithmetic", "make_debug_checkpoint.py"],
    ),
    ("ranks", "", ["--parallelism.data_parallel_shard_degree", "2"], ["data_parallel_shard_degree = 2", "1 rank"]),
    ("tensor parallel ranks", "", ["--parallelism.tensor_parallel_degree", "2"], ["must divide 1 rank"]),
    (
        "pinned to more cores than there are",
        "[inference]\npin_cores = true\nnum_actors = 3\nthreads_per_actor = 1000\n",
        [],
        ["inference.pin_cores = true", "needs 3000 cores (inference.num_actors 3 × 1000 threads each)"],
    ),
    ("health", "", ["--inference.health_timeout_s", "1"], ["health_timeout_s = 1.0", "health_interval_s"]),
]


@pytest.mark.parametrize(("more", "words", "parts"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_configurations(
    write_config: WriteConfig, capsys: pytest.CaptureFixture[str], more: str, words: list[str], parts: list[str]
) -> None:
    whole_file = more.endswith(GOOD)
    arguments = write_config(more) if whole_file else write_config(more=more)
    if parts[0].startswith("'oops'"):
        arguments = ["oops", *arguments]
    assert main([*arguments, *words]) == 2
    captured = capsys.readouterr()
    for part in parts:
        assert part in captured.err
    # One problem, one line: nothing that follows from it, and nothing of the parser's own.
    assert captured.err.startswith("error: configuration problem:\n  - ")
    assert len(captured.err.splitlines()) == 2, captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--grpo.delta 0 --grpo.allow_uncorrected",
        "--grpo.delta 0 --grpo.no-async_weight_update",
        "--grpo.delta 0 --grpo.off_policy_correction icepop",
        "--grpo.delta 0 --grpo.loss_type gspo --grpo.geometric_mask_high 2",
        "--grpo.loss_type sapo --grpo.delta 0",
        "--grpo.loss_type tests.unit_tests.grpo.test_objectives:own_loss --grpo.off_policy_correction mask",
        "--grpo.recompute_old_log_probs",
    ],
)
def test_what_bounds_off_policy_tokens_may_start(write_config: WriteConfig, words: str) -> None:
    load_config([*write_config(), *words.split()])


def test_gspo_has_a_clip_range_of_its_own(write_config: WriteConfig) -> None:
    """Review: 0.2 and 0.28 never clip the geometric mean of a sequence."""
    gspo = loss_settings(load_config([*write_config(), "--grpo.loss_type", "gspo"]).grpo)
    assert gspo.options.clip == ClipRange(3e-4, 4e-4, 3.0)
    given = ["--grpo.loss_type", "gspo", "--grpo.epsilon_high", "0.1"]
    assert loss_settings(load_config([*write_config(), *given]).grpo).options.clip == ClipRange(3e-4, 0.1, 3.0)
    assert loss_settings(load_config(write_config()).grpo).options.clip == ClipRange(0.2, 0.28, 3.0)


def test_problems_of_all_kinds_are_reported_together(write_config: WriteConfig) -> None:
    arguments = write_config(more="[optimzer]\nlr = 1.0\n[eval]\nenable = 'yes'\n")
    words = ["--training.step", "4", "--training.seed", "x", "--weight_sync.num_slots", "0", "--grpo.group_size", "3"]
    with pytest.raises(ConfigError) as caught:
        load_config([*arguments, *words])
    problems = caught.value.problems
    assert caught.value.exit_code == 2
    keys = ["optimzer", "eval.enable", "--training.step ", "training.seed", "num_slots", "group_size = 3"]
    assert len(problems) == len(keys)
    for key in keys:
        assert any(key in problem for problem in problems)


def test_keys_that_are_gone_are_passed_over_with_a_line(
    write_config: WriteConfig, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = write_config(more="[weight_sync]\noffer_timeout_s = 2.5\n")
    config = load_config([*arguments, "--weight_sync.streams", "3"])
    assert not hasattr(config.weight_sync, "streams")
    assert [message.partition(":")[2] for message in caplog.messages] == [
        " weight_sync.offer_timeout_s has no effect any more: actors ask for versions themselves",
        " weight_sync.streams has no effect any more: a connection takes what the network has",
    ]


def test_old_names_are_accepted_and_say_the_new_one(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(OLD_NAMES, "train.num_steps", "training.steps")
    monkeypatch.setitem(OLD_NAMES, "eval.enabled", "eval.enable")
    arguments = write_config(more="[eval]\nenabled = false\n[train]\nseed = 5\n")
    monkeypatch.setitem(OLD_NAMES, "train.seed", "training.seed")
    config = load_config([*arguments, "--train.num-steps", "9"])
    assert (config.training.steps, config.training.seed, config.eval.enable) == (9, 5, False)
    assert caplog.messages == [
        "job.toml: eval.enabled is now called eval.enable; the old name is accepted for now",
        "job.toml: train.seed is now called training.seed; the old name is accepted for now",
        "command line: train.num_steps is now called training.steps; the old name is accepted for now",
    ]
    with pytest.raises(ConfigError, match="training.steps = many is not allowed: training.steps takes an integer"):
        load_config([*arguments, "--train.num_steps", "many"])
    assert all(new in known_keys() and old not in known_keys() for old, new in OLD_NAMES.items())


def test_a_config_file_that_cannot_be_read_hides_no_mistake_of_the_command_line(write_config: WriteConfig) -> None:
    write_config()
    with pytest.raises(ConfigError) as caught:
        load_config(["--job.config_file", "nope.toml", "--training.stepz", "1"])
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("ranks", "words", "allowed"),
    [
        (2, ["--parallelism.tensor_parallel_degree", "2"], True),
        (4, ["--parallelism.tensor_parallel_degree", "4"], False),  # two key-value heads
        (3, ["--parallelism.tensor_parallel_degree", "3"], False),
        (4, ["--parallelism.tensor_parallel_degree", "2"], True),
        (3, ["--parallelism.tensor_parallel_degree", "2"], False),
        (4, ["--parallelism.data_parallel_replicate_degree", "2"], True),
        (4, ["--parallelism.data_parallel_replicate_degree", "3"], False),
        (8, ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=4"], True),
        (8, ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=2"], False),
        (2, ["--parallelism.data_parallel_shard_degree", "0"], False),
    ],
)
def test_layouts(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch, ranks: int, words: list[str], allowed: bool
) -> None:
    arguments = [*write_config(), *words]
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    if allowed:
        load_config(arguments)
        return
    with pytest.raises(ConfigError) as caught:
        load_config(arguments)
    assert "parallelism." in str(caught.value)


def test_servers_elsewhere_need_a_registry_that_they_reach(write_config: WriteConfig) -> None:
    elsewhere = ["--weight_sync.host", "10.0.0.1", "--inference.servers", "http://10.0.0.5:8000", "http://127.0.0.1:80"]
    assert load_config([*write_config(), *elsewhere]).weight_sync.host == "10.0.0.1"
    for wildcard in ("0.0.0.0", "::", " "):
        with pytest.raises(ConfigError, match="weight_sync.host"):
            load_config([*write_config(), "--weight_sync.host", wildcard])


def test_servers_on_this_machine_are_allowed(write_config: WriteConfig) -> None:
    servers = ["http://127.0.0.1:8000", "http://localhost:8001/", "http://[::1]:8002"]
    assert load_config([*write_config(), "--inference.servers", *servers]).inference.servers == servers


def test_slurm_node_lists_become_urls(write_config: WriteConfig) -> None:
    servers = ["slurm:gpu[01-03,7],login:8000-8001", "http://10.0.0.5:1"]
    config = load_config([*write_config(), "--weight_sync.host", "10.0.0.1", "--inference.servers", *servers])
    nodes = ["gpu01", "gpu02", "gpu03", "gpu7", "login"]
    assert config.inference.servers == [
        *(f"http://{node}:{port}" for node in nodes for port in (8000, 8001)),
        "http://10.0.0.5:1",
    ]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("a", "a"),
        ("a,b.cluster", "a b.cluster"),
        ("a[9-11]", "a9 a10 a11"),
        ("r[1-2]n[08-10]x", "r1n08x r1n09x r1n10x r2n08x r2n09x r2n10x"),
        ("a[1,3-4],b[007]", "a1 a3 a4 b007"),
    ],
)
def test_slurm_notation(expression: str, expected: str) -> None:
    # What `scontrol show hostnames` says of the same expressions.
    assert list(nodes(expression)) == expected.split()


@pytest.mark.parametrize("expression", ["", "a,", "a[1", "a]1", "a[]", "a[x]", "a b", "a[1-99999]", "a[[1]]", "a/b"])
def test_wrong_slurm_notation(expression: str) -> None:
    with pytest.raises(ValueError, match="no node|no list|no range"):
        list(nodes(expression))


def test_more_servers_than_anyone_has_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="more than 4096 servers"):
        slurm_urls("slurm:a[1-4000]b[1-4000]c[1-4000]:8000")


def test_options_of_the_engine_pass_through(write_config: WriteConfig) -> None:
    arguments = write_config(
        more="""
[inference]
backend = "vllm"
[inference.engine_args]
max_model_len = 1024
enforce-eager = true
enable-log-requests = false
served-model-name = ["a", "b"]
compilation-config = {level = 0, "custom.ops" = ["none"]}
"""
    )
    words = ["--inference.engine_args.max-model-len", "64", "--inference.engine_args.no-enable_prefix-caching"]
    words += [
        "--inference.engine-args.seed=-1",
        "--inference.engine_args.load-format",
        "dummy",
        "--training.steps",
        "3",
        "--rollout.chat-template-kwargs.enable_thinking=false",
    ]
    config = load_config([*arguments, *words])
    assert config.training.steps == 3
    assert config.rollout.chat_template_kwargs == {"enable_thinking": False}
    assert command_line(config.inference.engine_args) == [
        *("--max-model-len", "64", "--enforce-eager", "--served-model-name", "a", "b"),
        *("--compilation-config", '{"level": 0, "custom.ops": ["none"]}'),
        *("--no-enable-prefix-caching", "--seed", "-1", "--load-format", "dummy"),
    ]
    draft = Draft()
    draft.add(tomllib.loads(config_to_toml(config)), "x.toml")
    assert draft.build() == (config, [])


@pytest.mark.parametrize(
    "words",
    [
        ["--inference.backend", engine, "--weight_sync.route", route]
        for engine in ("vllm", "sglang")
        for route in ROUTES[engine]
    ]
    + [["--inference.backend", "vllm", "--inference.mode", "colocate"]],
)
def test_adapters_are_for_every_engine_and_probed(
    write_config: WriteConfig, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan.preflight.inference.has_gpu", lambda: True)
    config = load_config([*write_config(), "--lora.rank", "4", *words])
    assert verification(config) == "probe"


def test_colocated_layouts(write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [*write_config(), "--inference.backend", "vllm", "--inference.mode", "colocate"]
    monkeypatch.setenv("WORLD_SIZE", "4")
    for size, fits in ((1, True), (2, True), (4, True), (3, False), (8, False)):
        words = [*arguments, "--inference.tensor_parallel_size", str(size)]
        if fits:
            assert load_config(words).inference.tensor_parallel_size == size
        else:
            with pytest.raises(ConfigError, match=f"tensor_parallel_size = {size} .* must divide the 4 ranks"):
                load_config(words)


def test_sleep_needs_a_gpu_where_the_run_starts(write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*write_config(), "--inference.backend=vllm", "--inference.mode=colocate", "--inference.sleep_level=2"]
    monkeypatch.setattr("torchtitan.preflight.inference.has_gpu", lambda: True)
    assert load_config(words).inference.sleep_level == 2
    monkeypatch.setattr("torchtitan.preflight.inference.has_gpu", lambda: False)
    with pytest.raises(ConfigError, match="sleep_level = 2 .* without an NVIDIA GPU"):
        load_config(words)
    # Plans are made on any machine.
    assert load_config([*words, "--dry-run"]).inference.sleep_level == 2


def test_servers_sleep_only_where_every_step_waits_for_them(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan.preflight.inference.has_gpu", lambda: False)
    words = [*write_config(), "--inference.sleep_level=1"]
    blocking = [*words, "--grpo.async_weight_update=false"]
    assert load_config(blocking).inference.sleep_level == 1
    with pytest.raises(ConfigError, match="sleep_level = 1 .*async_weight_update = false"):
        load_config(words)
    for backend in ("vllm", "sglang"):
        foreign = [*blocking, f"--inference.backend={backend}"]
        with pytest.raises(ConfigError, match="sleep_level = 1 .*without an NVIDIA GPU"):
            load_config(foreign)
        # Servers that run already may have GPUs on machines of their own.
        load_config([*foreign, "--inference.servers", "http://127.0.0.1:8000"])
        monkeypatch.setattr("torchtitan.preflight.inference.has_gpu", lambda: True)
        load_config(foreign)
        with pytest.raises(ConfigError, match='transport = "nccl" .*one member of a communicator per GPU'):
            load_config([*foreign, "--weight_sync.transport=nccl"])
        monkeypatch.setattr("torchtitan.preflight.inference.has_gpu", lambda: False)
    monkeypatch.setattr("torchtitan.preflight.inference.has_gpu", lambda: True)
    adapters = [*blocking, "--inference.sleep_level=2", "--lora.rank=4"]
    with pytest.raises(ConfigError, match="sleep_level = 2 .*at most 1 with lora.rank"):
        load_config(adapters)
    monkeypatch.setenv("WORLD_SIZE", "2")
    load_config(blocking)
    with pytest.raises(ConfigError, match="sleep_timeout_s = 30.0 .*less than three quarters of comm.train_timeout_s"):
        load_config([*blocking, "--inference.sleep_timeout_s=30"])


def test_blocking_waits_end_before_collectives_do(write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [*write_config(), "--weight_sync.blocking_timeout_s", "120"]
    blocking = [*arguments, "--grpo.async_weight_update", "false"]
    load_config(blocking)
    monkeypatch.setenv("WORLD_SIZE", "2")
    load_config(arguments)
    load_config([*blocking, "--comm.train_timeout_seconds", "121"])
    with pytest.raises(ConfigError, match="blocking_timeout_s = 120.0 .* less than comm.train_timeout_seconds = 120"):
        load_config(blocking)


def test_a_flavor_without_weights_is_for_runs_that_start_no_actor(write_config: WriteConfig) -> None:
    words = ["--model.name", "qwen3", "--model.flavor", "debug"]
    arguments = [*write_config(), *words]
    load_config(arguments)
    Path("run").mkdir()
    Path("run/journal.jsonl").touch()
    for file in ("model.safetensors", "config.json"):
        Path("checkpoint", file).unlink()
        with pytest.raises(ConfigError, match="export one of this flavor first"):
            load_config(arguments)
        load_config([*arguments, "--rollout.replay", "run"])
        load_config([*arguments, "--inference.servers", "http://127.0.0.1:8000"])
    Path("checkpoint/tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="no tokenizer.json"):
        load_config([*arguments, "--rollout.replay", "run", "--eval.enable", "false"])


def test_the_same_dataset_with_another_split_is_a_fair_evaluation(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan.preflight.validate.find_spec", lambda name: name)
    arguments = [*write_config(), "--rollout.dataset", "openai/gsm8k:main", "--eval.dataset", "openai/gsm8k:main"]
    assert load_config(arguments).eval.dataset_split == "test"
    with pytest.raises(ConfigError, match="must not be the prompts of training"):
        load_config([*arguments, "--rollout.dataset_split", "test"])


REWARDS = """
raise SystemExit("nobody may run this to check a configuration")
from os.path import join as joined
try:
    import torch
except ImportError:
    fallback = None
else:
    async def quick(**kwargs): ...
"""


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("own.rewards:quick", None),
        ("own.rewards:fallback", None),
        ("own.rewards:joined", None),
        ("own.rewards:kwargs", "rewards.py has no kwargs"),
        ("own.rewards:quik", "has no quik (nearest: quick)"),
        ("own.open:anything", None),
        ("own.broken:f", "broken.py cannot be read as Python"),
        ("own.rewarts:quick", "module own.rewarts is not on the Python path"),
        ("own.rewards.more:quick", "module own.rewards.more is not on the Python path"),
        ("awn.rewards:quick", "module awn.rewards is not on the Python path"),
        ("name.space.rewards:quick", None),
        ("name.space:quick", "is a folder"),
        ("json:loads", None),
        ("math:sqrt", None),
    ],
)
def test_own_rewards_are_looked_for_and_not_run(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, problem: str | None
) -> None:
    arguments = write_config()
    for folder in ("own", "name/space"):
        Path(folder).mkdir(parents=True)
        Path(folder, "rewards.py").write_text(REWARDS)
    Path("own/__init__.py").touch()
    Path("own/open.py").write_text("from own.rewards import *")
    Path("own/broken.py").write_text("def f(:")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        for key in ("rewards.functions", "eval.reward_function"):
            if problem is None:
                load_config([*arguments, f"--{key}={name}"])
                continue
            with pytest.raises(ConfigError, match=re.escape(problem)) as caught:
                load_config([*arguments, f"--{key}={name}"])
            assert len(caught.value.problems) == 1 and caught.value.problems[0].startswith(key)
    finally:
        for module in ("own", "name", "name.space"):
            sys.modules.pop(module, None)


def test_tensor_parallel_degree_names_what_the_model_allows(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"tensor_parallel_degree = 4 .* 2 key-value heads \(allowed: 1, 2\)"):
        load_config([*write_config(), "--parallelism.tensor_parallel_degree", "4"])


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "no config.json"),
        ("tokenizer.json", "no tokenizer.json"),
        ("model.safetensors", "no *.safetensors"),
    ],
)
def test_missing_checkpoint_files(write_config: WriteConfig, missing: str, message: str) -> None:
    arguments = write_config()
    Path("checkpoint", missing).unlink()
    with pytest.raises(ConfigError) as caught:
        load_config(arguments)
    assert len(caught.value.problems) == 1
    assert message in caught.value.problems[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "config.json"),
        ("[]", "config.json"),
        ('{"model_type": "gpt2"}', "gpt2"),
        ('{"model_type": "qwen3", "num_attention_heads": 4}', "config.json lacks vocab_size"),
    ],
)
def test_unusable_model_config(write_config: WriteConfig, content: str, message: str) -> None:
    arguments = write_config()
    Path("checkpoint/config.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_config(arguments)
    assert len(caught.value.problems) == 1
    assert message in caught.value.problems[0]


def test_resume_and_replay_folders_are_found(write_config: WriteConfig) -> None:
    arguments = write_config()
    Path("outputs/run-1/checkpoint/step-4").mkdir(parents=True)
    Path("outputs/latest").symlink_to("run-1")
    Path("outputs/run-1/journal.jsonl").touch()
    for folder in ("latest", "outputs/run-1"):
        words = ["--checkpoint.resume", folder, "--checkpoint.load_step", "4", "--rollout.replay", "outputs/run-1"]
        assert load_config([*arguments, *words]).checkpoint.resume == folder


def test_the_home_folder_is_resolved_once_for_everybody(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    arguments = write_config(GOOD.replace('"checkpoint"', '"~/checkpoint"'), more="[eval]\ndataset = '~/e.jsonl'\n")
    Path("run/checkpoint/step-1").mkdir(parents=True)
    for name in ("run/journal.jsonl", "e.jsonl", "d.jsonl"):
        Path(name).touch()
    words = ["--job.dump_folder=~/out", "--checkpoint.resume=~/run", "--rollout.dataset=~/d.jsonl"]
    config = load_config([*arguments, *words, "--rollout.replay=~/run"])
    assert config.model.hf_assets_path == f"{tmp_path}/checkpoint"
    assert (config.job.dump_folder, config.checkpoint.resume) == (f"{tmp_path}/out", f"{tmp_path}/run")
    assert (config.rollout.dataset, config.eval.dataset) == (f"{tmp_path}/d.jsonl", f"{tmp_path}/e.jsonl")
    assert config.rollout.replay == f"{tmp_path}/run"
    with pytest.raises(ConfigError, match="no directory"):
        load_config([*arguments, "--model.hf_assets_path=~nobody-of-this-name/x"])


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    if kind is bool:
        return st.booleans()
    if kind is int:
        return st.integers(-(2**63), 2**63 - 1)
    if kind is float:
        return st.floats(allow_nan=False)
    if kind is str:
        return st.text(st.characters(exclude_categories=["Cs"]))
    if kind == list[str]:
        return st.lists(values_of(str), max_size=3)
    if kind == list[int]:
        return st.lists(values_of(int), max_size=3)
    if kind == list[float]:
        return st.lists(values_of(float), max_size=3)
    if kind == dict[str, Any]:
        scalars = st.one_of(*map(values_of, (bool, int, float, str)))
        deeper = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | tables(inner), max_leaves=5)
        return tables(deeper)
    return st.sampled_from(kind.__args__)


def tables(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(values_of(str), values, max_size=3)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_what_is_written_reads_back(data: st.DataObject) -> None:
    config = JobConfig()
    for name in data.draw(st.lists(st.sampled_from(sorted(known_keys())), max_size=12)):
        table, _, key = name.partition(".")
        setattr(getattr(config, table), key, data.draw(values_of(known_keys()[name].annotation)))
    again = tomllib.loads(config_to_toml(config))
    assert again == asdict(config)
    # What is read is what was written, in type too; all that the draft may refuse is a number or name out of bounds.
    draft = Draft()
    draft.add(again, "x.toml")
    read, problems = draft.build()
    assert all(" takes " not in problem.text for problem in problems)
    for problem in problems:
        table, _, key = problem.key.partition(".")
        setattr(getattr(read, table), key, getattr(getattr(config, table), key))
    assert read == config


def rules_of(name: str, kind: type) -> list[Any]:
    return [rule for rule in known_keys()[name].metadata if isinstance(rule, kind)]


def test_every_number_has_a_range_and_every_default_is_allowed() -> None:
    for name, info in known_keys().items():
        assert len(rules_of(name, Range)) == (info.annotation in (int, float)), name
    draft = Draft()
    draft.add(asdict(JobConfig()), "defaults")
    assert draft.build() == (JobConfig(), [])


def test_the_reference_is_current_and_complete() -> None:
    assert all(info.description for info in known_keys().values())
    command = "python -m torchtitan.config.reference > docs/config.md"
    assert (ROOT / "docs/config.md").read_text(encoding="utf-8") == markdown(), f"out of date: {command}"


def test_known_names_are_those_of_the_code() -> None:
    from torchtitan.grpo.objectives import OBJECTIVES

    assert [rule.known for rule in rules_of("grpo.loss_type", Names)] == [LOSS_TYPES] == [tuple(OBJECTIVES)]


def test_known_routes_are_those_of_the_engines() -> None:
    from torchtitan.inference.agent.engine import load_engine

    for name, routes in ROUTES.items():
        assert routes[0] == "auto"
        assert name == "embedded" or sorted(routes[1:]) == sorted(load_engine(name).routes)


def test_plan_of_a_small_model_by_hand(write_config: WriteConfig) -> None:
    config = load_config([*write_config(), "--inference.dtype", "bfloat16", "--weight_sync.num_slots", "4"])
    plan = make_plan(config, 1)
    # Per layer: q 32×16, k and v 16×16 each, o 16×32, two head norms of 8, three 16×24 matrices, two norms of 16.
    layer = 512 + 2 * 256 + 512 + 16 + 3 * 384 + 32
    parameters = 2 * layer + 50 * 16 + 16
    assert plan.parameters == parameters
    assert (plan.batch, plan.groups, plan.max_tokens, plan.max_generated_tokens) == (32, 4, 2048, 1024)
    assert plan.version_bytes == 2 * parameters
    memory = plan.memory
    assert memory is not None
    assert (memory.parameters, memory.gradients, memory.optimizer) == (4 * parameters, 4 * parameters, 8 * parameters)
    assert (memory.slots, memory.gathered) == (4 * 2 * parameters, 0)
    assert memory.logits == 4 * 4 * 256 * 50
    assert memory.activations == 4 * 256 * 2 * (5 * 16 + 3 * 32 + 4 * 16 + 4 * 24)
    assert memory.total == sum(vars(memory).values())


def test_plan_over_ranks(write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = write_config()
    monkeypatch.setenv("WORLD_SIZE", "8")
    words = ["--parallelism.tensor_parallel_degree", "2", "--parallelism.data_parallel_replicate_degree", "2"]
    config = load_config([*arguments, *words, "--training.global_batch_size=-1", "--training.local_batch_size=16"])
    plan, alone = make_plan(config, 8), make_plan(replace(config, parallelism=JobConfig().parallelism), 1)
    assert (plan.replicate, plan.shard, plan.tensor, plan.batch) == (2, 2, 2, 64)
    assert plan.memory is not None and alone.memory is not None
    assert plan.memory.parameters * 4 == pytest.approx(alone.memory.parameters, rel=1e-3)
    assert plan.version_bytes == alone.version_bytes
    config.parallelism.fsdp_reduce_gradients = "optimizer_step"
    once = make_plan(config, 8).memory
    assert once is not None and plan.parameters is not None
    assert once.gradients == plan.memory.gradients + 4 * (plan.parameters // 2)
    text = describe_plan(config, 8)
    assert "# ranks: 8\n# mesh: 2 replicate × 2 shard × 2 tensor parallel" in text
    assert "tokens per step: at most 4,096, of which at most 2,048 are generated" in text


def test_plan_of_a_public_shape_needs_no_files(write_config: WriteConfig, capsys: pytest.CaptureFixture[str]) -> None:
    write_config()
    words = ["--dry-run", "--model.name", "qwen3", "--model.flavor", "8B", "--inference.dtype", "bfloat16"]
    assert main([*words, "--weight_sync.delta", "true"]) == 0
    # 8.19 billion, as published; 61.03 GiB are four times 15.26.
    text = capsys.readouterr().out
    assert "# bytes per weight version: 16,381,470,720 (15.26 GiB, bfloat16)" in text
    assert "# slots per rank: 4, together 61.03 GiB of host memory" in text
    assert "# base of deltas per rank: 15.26 GiB, one of the slots" in text
    assert "# staging per actor: 15.26 GiB of host memory\n" in text
    assert main(["--model.name", "qwen3", "--model.flavor", "8B"]) == 2


def test_missing_debug_checkpoint_is_named_for_the_launcher(
    write_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*write_config(), "--model.hf_assets_path", "x/assets/debug_arithmetic"]
    assert main(["--missing-assets", *arguments]) == 0
    assert capsys.readouterr().out == "x/assets/debug_arithmetic\n"
    assert main(["--missing-assets", *write_config()]) == 0
    assert capsys.readouterr().out == ""
    assert main(["--missing-assets", *arguments, "--grpo.group_size", "1"]) == 2


# Configurations for GPUs -> their ranks; they are planned by a public shape.
FOR_GPUS = {
    "qwen3_30b_a3b_8gpu": 8,
    "gpt_oss_20b_8gpu": 8,
    "llama3.1_8b_128k_8gpu": 8,
    "qwen3_0.6b_gsm8k_vllm": 1,
    "qwen3_0.6b_1gpu": 1,
    "qwen2.5_math_7b_colocated": 8,
    "qwen2.5_math_72b_4nodes": 32,
    "llama3.1_8b_gsm8k_sglang": 4,
}


@pytest.mark.parametrize("name", FOR_GPUS)
def test_shipped_configurations_for_gpus_are_planned_without_their_files(
    name: str, write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config()
    monkeypatch.setenv("WORLD_SIZE", str(FOR_GPUS[name]))
    monkeypatch.setenv("TORCHTITAN_DEVICE", "cuda")
    device_bytes = (24 if name == "qwen3_0.6b_1gpu" else 80) * 2**30
    monkeypatch.setattr(plan, "device_bytes_of_driver", lambda: device_bytes)
    file = ROOT / "train_configs" / f"{name}.toml"
    assert main(["--dry-run", "--job.config_file", str(file)]) == 0
    said = capsys.readouterr().out
    assert "memory estimate per rank" in said and "DOES NOT FIT" not in said and "step time at most: " in said
    for half in re.findall(r"while (?:training|generating): (\S+) GiB", said):
        assert float(half) * 2**30 < device_bytes
    # Without its files nothing but planning is possible, and what is missing is said.
    assert main(["--job.config_file", str(file)]) == 2
    assert "model.hf_assets_path" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_defaults_are_those_of_the_device_where_no_value_is_given(
    on_gpu: bool,
    engine: str,
    write_config: WriteConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [*write_config(), "--inference.backend", engine, "--dry-run"]
    monkeypatch.setenv("TORCHTITAN_DEVICE", "cuda" if on_gpu else "cpu")
    assert main(arguments) == 0
    said = capsys.readouterr().out
    computed, budget = ("bfloat16", 1024) if on_gpu else ("float32", 0)
    assert f'mixed_precision_param = "{computed}"' in said and f"logprob_head_budget_mb = {budget}\n" in said
    assert f"{computed} products, float32 masters, float32 reduction, fused AdamW" in said
    config = load_config(arguments)
    assert config.inference.dtype == (computed if engine == "vllm" else "float32")
    # What is named wins, and master weights that lose updates are not passed over in silence.
    config = load_config([*arguments, "--training.mixed_precision_param", "float32"])
    assert config.training.mixed_precision_param == "float32"
    assert "WARNING" not in said and main([*arguments, "--training.dtype", "bfloat16"]) == 0
    assert "WARNING: training.dtype" in capsys.readouterr().out


def test_a_gpu_is_what_the_driver_lists_and_nobody_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHTITAN_DEVICE", raising=False)
    monkeypatch.setattr(device_defaults.shutil, "which", lambda program: f"/bin/{program}")
    monkeypatch.setattr(device_defaults, "count_gpus", lambda: 8)
    for listed, hidden in ((0, None), (2, None), (2, "")):
        monkeypatch.setattr(device_defaults, "gpus_of_driver", lambda listed=listed: listed)
        if hidden is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert device_defaults.trains_on_gpu() is (listed > 0 and hidden is None)


@pytest.mark.parametrize("name", FOR_GPUS)
def test_commands_in_the_headers_of_configurations_for_gpus_exist(name: str) -> None:
    text = (ROOT / "train_configs" / f"{name}.toml").read_text(encoding="utf-8")
    header = text[: text.index("[job]")]
    scripts = set(re.findall(r"\S*?((?:scripts/|\./)\w+\.(?:sh|slurm))", header))
    assert {"scripts/setup_env.sh", "./run_grpo.sh"} <= scripts and all((ROOT / one).is_file() for one in scripts)
    assert re.findall(r"CONFIG_FILE=(\S+)", header) == [f"train_configs/{name}.toml"]
    # The extra data brings datasets, and with it the program hf.
    assert "scripts/setup_env.sh data &&" in header and "EXTRAS=data" in header
    (repository, folder) = re.findall(r"\.venv/bin/hf download (\S+) --local-dir (\S+)", header)[0]
    assert f'hf_assets_path = "./{folder}"' in text and repository.endswith(Path(folder).name)
    assert "hf" in {script.name for script in entry_points(group="console_scripts")}
    engine = re.findall(r"scripts/install_engine\.sh (\w+)", header)
    assert engine == re.findall(r'^backend = "(\w+)"$', text, re.MULTILINE)
    ranks = [int(count) for count in re.findall(r"NGPU=(\d+)", header)]
    assert ranks in ([], [FOR_GPUS[name]]) and (ranks or FOR_GPUS[name] == 1)


DEBUG = sorted(file for file in (ROOT / "train_configs").glob("*.toml") if file.stem not in FOR_GPUS)


@pytest.mark.parametrize("file", DEBUG, ids=lambda path: path.stem)
def test_shipped_configurations(file: Path, write_config: WriteConfig) -> None:
    write_config()
    # A debug checkpoint of their own shape is not here, so only what does not depend on it is looked at.
    changes = ["--model.hf_assets_path", "checkpoint", "--training.seq_len", "128"]
    changes += ["--distill.teacher", "checkpoint"] if file.stem == "distill_cpu" else []
    load_config(["--job.config_file", str(file), *changes, "--parallelism.expert_parallel_degree", "1"])


def test_entry_points_answer_without_traceback_and_without_torch(write_config: WriteConfig) -> None:
    arguments = [*write_config(), "--grpo.group_size", "1", "--training.stepz", "3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for module in ("torchtitan.preflight", "torchtitan.grpo_train"):
        command = [sys.executable, "-X", "importtime", "-m", module, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE_S, check=False)
        assert done.returncode == 2
        imported, _, message = done.stderr.partition("error: ")
        assert message.startswith("2 configuration problems:\n")
        assert "Traceback" not in done.stderr
        assert "| torch\n" not in imported


def test_mistakes_in_the_environment_are_all_named(tmp_path: Path) -> None:
    tables = {
        "model": {"hf_assets_path": str(tmp_path / "assets" / "debug_guess")},
        "environment": {
            "factory": "torchtitan.rollout.environments.guess:Gues",
            "tools": ["no.such.module:tool", "no.such.module:tool"],
            "tool_parser": "torchtitan.rollout.environments.calculator:bracket",
            "max_turns": 0,
        },
        "rewards": {"functions": []},
    }
    draft = Draft()
    draft.add(tables, "test")
    with pytest.raises(ConfigError) as caught:
        validated(draft, planning=True)
    text = str(caught.value)
    for words in (
        "Gues",
        "(nearest: Guess)",
        "module no.such.module",
        "may be named once",
        "bracket_calls",
        "max_turns",
    ):
        assert words in text, text
    assert "rewards.functions" not in text


def test_the_folder_of_a_run_stands_for_its_last_export(write_config: WriteConfig, tmp_path: Path) -> None:
    arguments = write_config()
    for step in (9, 10):
        shutil.copytree("checkpoint", tmp_path / "run" / "hf" / f"step-{step}")
    (tmp_path / "latest").symlink_to("run")
    config = load_config([*arguments, "--model.hf_assets_path", str(tmp_path / "latest")])
    # The link will soon be another run's.
    assert config.model.hf_assets_path == str((tmp_path / "run" / "hf" / "step-10").resolve())
