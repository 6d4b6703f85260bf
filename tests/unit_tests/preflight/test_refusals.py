"""What a configuration must satisfy, and how a mistake in it is named."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

from tests.unit_tests.conftest import GOOD, SHAPE, WriteConfig
from torchtitan.config.values import read_toml
from torchtitan.errors import ConfigError
from torchtitan.preflight.__main__ import main
from torchtitan.preflight.validate import load_config

# Words of the command line | what the message must contain.
ON_THE_COMMAND_LINE = """
--job.config_file jb.toml | "jb.toml" does not exist | nearest: job.toml
--job.config_file debug_cpy | "debug_cpy" does not exist | nearest: debug_cpu)
--job.config_file checkpoint | checkpoint | cannot be read
--grpo.group_sise 4 | --grpo.group_sise | nearest: grpo.group_size
--grpo.no_async_weight_update x | 'x' does not belong to any | takes no value
--steps 5 | --steps is not a known key | nearest: training.steps
--stepz 5 | --stepz is not a known key | nearest: training.steps
training.steps 5 | 'training.steps' must begin with two hyphens: --training.steps
–training.steps 5 | '–training.steps' must begin with two hyphens: --training.steps
—training.steps=5 | '—training.steps=5' must begin with two hyphens: --training.steps=5
-training.steps 5 | '-training.steps' must begin with two hyphens: --training.steps
my.toml | 'my.toml' stands without a key: --job.config_file my.toml, or CONFIG_FILE=my.toml ./run_grpo.sh
--job.config_file debug_cpu my.toml --training.steps 5 | 'my.toml' stands without a key
--grpo.group_size 8 training.steps=5 | 'training.steps=5' must begin with two hyphens
--job.config_file ~/no-such-folder/x.toml | does not exist | looked in /
--dry-rum | --dry_rum | nearest: dry_run
--grpo.beta 0.1 | --grpo.beta is not a known key (beta is grpo.kl_coefficient here)
--num_generations 8 | --num_generations is not a known key (num_generations is grpo.group_size here)
--grpo.epsilon 0.2 | --grpo.epsilon is not a known key (nearest: grpo.epsilon_low)
--optimizer.beta 0.9 | --optimizer.beta is not a known key (nearest: optimizer.beta
--actor_rollout_ref.rollout.n=8 | (rollout.n is grpo.group_size here)
--actor_rollout_ref.actor.kl-loss-coef 0.1 | (kl_loss_coef is grpo.kl_coefficient here)
--data.train_batch_size 8 | (train_batch_size is training.global_batch_size (in completions, over all ranks) here)
--rollout.generate_max_len 8 | (generate_max_len is rollout.max_completion_tokens here)
oops | 'oops' does not belong to any
--training.steps many | training.steps = many | takes an integer
--model.name qwen4 | model.name = qwen4 | llama3 | nearest: qwen
--eval.greedy maybe | eval.greedy = maybe | true or false
--grpo.group_size 1 | grpo.group_size = 1 | at least 2
--grpo.group_size 5 | global_batch_size = 32 | divisible by grpo.group_size = 5
--grpo.num_minibatches 3 | grpo.num_minibatches = 3 | 4 groups
--training.global_batch_size 0 | global_batch_size = 0 | at least 1
--lora.rank 100000 | lora.rank = 100000 | at most the model's hidden_size = 16
--weight_sync.num_slots 1 | weight_sync.num_slots = 1 | at least 3
--grpo.loss_type dap | grpo.loss_type = "dap" | dr_grpo | nearest: dapo
--inference.backend embeded | "embeded" | nearest: embedded
--weight_sync.transport ipc --weight_sync.tcp.delta | weight_sync.tcp.delta = (no value) has no effect | is "ipc"
--weight_sync.delta | (weight_sync.delta is weight_sync.tcp.delta here)
--weight_sync.transport disk --weight_sync.disk.path nothing://x/y | disk.path = "nothing://x/y" | extra `remote`
--weight_sync.transport nccl --training.enable_cpu_offload \
    | enable_cpu_offload = true | weight_sync.transport tcp or disk
--weight_sync.transport ipc --training.enable_cpu_offload \
    | enable_cpu_offload = true | weight_sync.transport tcp or disk
--inference.mode colocate | (inference.mode is inference.backend (colocated for colocate) here)
--inference.vllm.tensor_parallel_size 2 | inference.vllm.tensor_parallel_size = 2 has no effect | is "embedded"
--inference.backend sglang --inference.vllm.args.seed 1 | inference.vllm.args = {seed = 1} has no effect | is "sglang"
--inference.embedded.python x | --inference.embedded.python is not a known key | nearest: inference.
--inference.sleep_level 1 | inference.sleep_level = 1 | needs grpo.async_weight_update = false
--inference.sleep_level 3 | inference.sleep_level = 3 | 0 to 2
--inference.backend sglang --inference.sglang.route direct | --inference.sglang.route | inference.vllm.route
--inference.backend sglang --inference.update_mode drain | update_mode = "drain" | cannot drain running requests
--inference.backend vllm --inference.vllm.route agent --weight_sync.verify digest | verify = "digest" | use probe
--inference.backend colocated --weight_sync.verify digest | verify = "digest" | use probe
--inference.backend vllm --inference.vllm.args.quantization fp8 --weight_sync.verify digest \
    | verify = "digest" | does not look at quantised weights
--training.seed -1 | seed = -1 | 0 to 4294967295
--inference.backend vllm --inference.vllm.python /no/python | "/no/python" | no such file
--inference.backend vllm --inference.vllm.args.tp 2 | tp = 2 | tensor_parallel_size
--inference.backend vllm --inference.vllm.args.=2 | an option's name
--inference.backend vllm --inference.num_actors 0 | num_actors = 0 | inference.servers
--inference.discover | discover = true | TORCHTITAN_ACTOR_TOKEN
--inference.backend colocated --inference.discover | discover = true | an engine with actors
--inference.backend colocated --inference.servers http://127.0.0.1:1 | inference.servers | must be empty
--inference.vllm.args x | --inference.vllm.args.NAME VALUE
--rollout.chat_template_kwargs.tools '[]' | chat_template_kwargs | must not have messages, tools or
--inference.servers http://localhost:1 http://localhost:1 | named only once
--inference.servers 'slurm:gpu[1-2]' | slurm:gpu[1-2] | slurm:NODES:PORT
--inference.servers 'slurm:gpu[3-2]:80' | 3 to 2 is not a range
--inference.servers slurm:gpu1:70000 | 70000 is not a port
--rewards.functions acuracy | "acuracy" | package.module:function | nearest: accuracy
--rewards.functions 'my module:f' | "my module:f" | package.module:function
--rewards.functions format format | rewards.functions | once
--environment.tools tests.agent_examples:play tests.agent_examples:play | environment.tools | only once
--weight_sync.host 0.0.0.0 | weight_sync.host = "0.0.0.0" | a single address
--job.dump_folder '' | job.dump_folder = "" | must be a folder
--grpo.observation_coefficient 0.1 --job.stage sft | grpo.observation_coefficient = 0.1 | needs job.stage = grpo
--job.stage distill --distill.teacher checkpoint --distill.coefficient 0 | distill.coefficient = 0.0 | greater than 0
--rewards.functions | rewards.functions = [] | at least one
--rewards.weights 1 2 | rewards.weights = [1.0, 2.0] | one weight for each
--environment.agent tests.agent_examples:pley | environment.agent | nearest: play
--environment.agent "'unclosed" | environment.agent = "'unclosed" | No closing quotation
--environment.agent ' ' | environment.agent = " " | there is no program ''
--environment.agent 'no-such-program x' | environment.agent | no-such-program
--environment.gateway.host 0.0.0.0 | environment.gateway.host = "0.0.0.0" | set environment.gateway.url
--environment.gateway.url run.example:80 | environment.gateway.url | must be http:// or https://
--environment.gateway.url http://run.example/v1 | environment.gateway.url | without /v1
--environment.verifiers.runtime.type vm | environment.verifiers.runtime | subprocess
--environment.verifiers.id x --environment.verifiers.runtime.type docker | environment.sandbox.isolate | must be false
--rewards.sandbox.variables NO_SUCH_VARIABLE | rewards.sandbox.variables | no environment variable NO_SUCH_VARIABLE
--environment.agent tests.agent_examples:play \
    --environment.tools torchtitan.rollout.environments.builtin_environments:add \
    | environment.agent | cannot be combined with
--eval.reward_function acc | eval.reward_function | "acc"
--rollout.max_staleness 9 | rollout.max_staleness = 9 | 0 to 8
--rollout.temperature 0 | rollout.temperature = 0.0 | greater than 0
--rollout.temperature nan | rollout.temperature = nan | finite, greater than 0
--rollout.min_p 1 | rollout.min_p = 1.0 | at least 0 and less than 1
--training.seq_len 32 | max_completion_tokens = 32 | seq_len = 32
--training.tokens_per_micro_batch 63 | tokens_per_micro_batch = 63 | seq_len = 64
--training.seq_len 129 | training.seq_len = 129 | = 128
--rollout.stop_token_ids 3 50 | rollout.stop_token_ids | [50] | 0 to 49
--grpo.delta 1.1 | grpo.delta = 1.1 | 1.28
--grpo.delta 0 | grpo.delta | off-policy token | allow_uncorrected = true
--grpo.delta 0 --grpo.no-async_weight_update | grpo.delta | off-policy token | rollout.max_staleness
--grpo.delta 0 --grpo.geometric_mask 0.5 2 | grpo.delta | off-policy token | allow_uncorrected = true
--grpo.loss_type cispo --grpo.epsilon_high 50 | grpo.epsilon_high | off-policy token | allow_uncorrected = true
--grpo.icepop_band 2 1 | grpo.icepop_band = [2.0, 1.0] | low < high
--grpo.geometric_mask 2 | grpo.geometric_mask = [2.0] | empty, or two numbers
--grpo.loss_type gmpo --grpo.geometric_mask 0.5 2 | grpo.loss_type = "gmpo" | off-policy token
--grpo.loss_type gmpo --grpo.off_policy_correction mask | grpo.loss_type = "gmpo" | another objective
--grpo.loss_type dppo | grpo.loss_type = "dppo" | off-policy token
--grpo.loss_type tests.unit_tests.grpo.test_objectives:own_loss \
    | grpo.loss_type | off-policy token | allow_uncorrected = true
--grpo.loss_type tests.unit_tests.grpo.test_objectives:own_loss --grpo.recompute_old_log_probs \
    | grpo.loss_type | off-policy token | allow_uncorrected = true
--grpo.loss_type tests.unit_tests.grpo.test_objectives:own_loss_of_sequences --grpo.off_policy_correction mask \
    | grpo.loss_type | off-policy token | set another objective
--grpo.recompute_old_log_probs --grpo.off_policy_correction none \
    | grpo.off_policy_correction | off-policy token | allow_uncorrected = true
--grpo.recompute_old_log_probs --grpo.delta 0 | grpo.delta | off-policy token | allow_uncorrected = true
--metrics.loggers wandb mlflow | metrics.loggers = ["wandb", "mlflow"] | tensorboard
--rollout.held_out_fraction 0 | held_out_fraction = 0.0 | eval.dataset
--rollout.system_prompt Hi | rollout.system_prompt = "Hi" | chat_template = true
--rollout.dataset x.jsonl | rollout.dataset = "x.jsonl" | no such file
--eval.dataset ./e.jsonl | eval.dataset = "./e.jsonl" | no such file
--eval.dataset arithmetic | eval.dataset | prompts of training
--rollout.dataset checkpoint | rollout.dataset | arithmetic
--rollout.dataset arithmetics --dry-run | rollout.dataset = "arithmetics" | nearest: arithmetic
--inference.servers localhost | "localhost" | http://127.0.0.1:8000
--inference.servers http://10.0.0.5:8000 | http://10.0.0.5:8000 | this machine
--inference.servers https://node7 | "https://node7" | this machine
--rollout.replay runs/1 | rollout.replay = "runs/1" | journal.jsonl
--job.stage sft --grpo.recompute_old_log_probs | grpo.recompute_old_log_probs = true | stage = sft
--job.stage sft --rollout.temperature 0.7 | rollout.temperature = 0.7 | must be 1
--sft.epochs 2 | sft.epochs = 2 | needs job.stage = sft
--distill.teacher checkpoint | distill.teacher | needs job.stage = distill
--job.stage distill | distill.teacher = "" | checkpoint directory
--job.stage distill --distill.add_rewards | distill.teacher = "" | checkpoint directory
--job.stage distill --distill.teacher checkpoint --distill.server.url a:1 | "a:1" | must be a URL
--distill.divergence jsd | distill.divergence = "jsd" | needs job.stage = distill
--distill.divergence l2 | distill.divergence = "l2" | forward_kl
--job.stage distill --distill.hint answer | distill.hint = "answer" | needs distill.divergence
--job.stage distill --distill.teacher nowhere | distill.teacher | no config.json
--job.stage distill --distill.teacher checkpoint --grpo.kl_coefficient 1 | grpo.kl_coefficient | place
--job.stage sft --eval.stop_at 0.5 | eval.stop_at = 0.5 | sft.sample = true
--checkpoint.resume runs/1 | checkpoint.resume = "runs/1" | no run folder
--checkpoint.resume latest | outputs/latest
--job.dump_folder job.toml | job.dump_folder = "job.toml" | must be a folder
--job.name a/b | job.name = "a/b" | letters
--model.hf_assets_path chekpoint | chekpoint | nearest: checkpoint
--model.hf_assets_path HuggingFaceTB/SmolLM2-135M | hf download HuggingFaceTB/SmolLM2-135M
--model.hf_assets_path '' | model.hf_assets_path = "" | config.json
--model.name llama3 | model.name = "llama3" | qwen3 | auto
--model.flavor 0.6 | model.flavor = "0.6" | nearest: 0.6B
--model.hf_assets_path assets/debug_arithmetic | assets/debug_arithmetic | give debug_arithmetic
--parallelism.data_parallel_shard_degree 2 | data_parallel_shard_degree = 2 | 1 rank
--parallelism.tensor_parallel_degree 2 | must divide 1 rank
--lora.rank 3 --lora.target_modules q_proj v_porj | lora.target_modules | nearest: v_proj
--lora.rank 3 --lora.target_modules | lora.target_modules = [] | at least one of
--lora.rank 3 --lora.target_modules q_proj q_proj | lora.target_modules | named only once
--lora.rank 3 --lora.modules_to_save q_proj | lora.modules_to_save | is in lora.target_modules
--lora.rank 3 --lora.modules_to_save lm_head | lora.modules_to_save | ties lm_head
--lora.rank 3 --lora.modules_to_save norm --training.dtype bfloat16 | lora.modules_to_save | training.dtype = float32
--lora.rank 3 --lora.adapter_path nowhere | lora.adapter_path = "nowhere" | no adapter_config.json
--lora.rank 3 --grpo.kl_coefficient 0.1 --grpo.reference_ema_decay 0.9 | grpo.reference_ema_decay | lora.rank
--lora.base_bits 4 | lora.base_bits = 4 | lora.rank = 0
"""
# What stands in the file, at its top where it begins with a key -> what the message must contain.
IN_THE_FILE: dict[str, list[str]] = {
    "[data]\nmax_response_length = 3\n": ["unknown table [data] (max_response_length is rollout.max_completion_tokens"],
    "[inference]\nnum_generations = 3\n": ["inference.num_generations = 3 (num_generations is grpo.group_size here)"],
    "max_steps = 3\n": ["max_steps = 3 stands outside a table (max_steps is training.steps"],
    "[[source]]\nname = 'x'\ntrain_files = 'a'\n": [
        'unknown key train_files = "a" (train_files is rollout.dataset here)'
    ],
    "[grop]\nx = 1\n": ["unknown table [grop]", "nearest: grpo"],
    "\ufefftraining_steps = 3\n": ["training_steps = 3 stands outside a table (nearest: training.steps)"],
    "[weight_sync]\nnum_slot = 3\n": ["num_slot = 3", "nearest: weight_sync.num_slots"],
    "[inference]\ngroup_size = 3\n": ["inference.group_size", "nearest: grpo.group_size"],
    "compile = 3\n": ["compile = 3 must be a table"],
    "[optimizer]\nlr = 'fast'\n": ['optimizer.lr = "fast"', "takes a number"],
    "[weight_sync]\nnum_slots = true\n": ["num_slots = true", "takes an integer"],
    "[weight_sync]\nnum_slots = 3.0\n": ["num_slots = 3.0", "takes an integer"],
    "[eval]\ngreedy = 1\n": ["eval.greedy = 1", "true or false"],
    "[rewards]\nfunctions = 'accuracy'\n": ["rewards.functions", "a list"],
    "[lora]\nmodules_to_save = ['x', 1]\n": ["lora.modules_to_save", "each element a string"],
    "[compile]\n[lr_scheduler]\ndecay_type = 'cosin'\n": ['"cosin"', "linear", "nearest: cosine"],
    "[eval\n": ["job.toml", "not valid TOML", "line 14"],
    '[inference]\nbackend = "vllm"\n[inference.vllm.args]\nmax-model-len = 8000\nmax_model_len = 9000\n': [
        "max_model_len = 9",
        "same option as max-model-len",
    ],
    '[inference]\nbackend = "vllm"\n[inference.vllm.args]\nseed = 2026-01-01\n': [
        "inference.vllm.args",
        "takes a table",
    ],
    "[weight_sync]\nprobe_tolerance = inf\n": ["weight_sync.probe_tolerance = inf"],
}


# Behind a policy that teaches itself, with a hint.
HINTED = "--job.stage distill --distill.divergence jsd --distill.hint "
OF_HINTS = """
answer --environment.factory tests.unit_tests.rollout.environment_examples:Counter | distill.hint | single-turn
success --rewards.functions [] --eval.num_prompts 0 | distill.hint | scores
success --environment.agent tests.agent_examples:play --rewards.functions [] | distill.hint | agent
answer --lora.rank 4 --grpo.reference_ema_decay 0.9 | lora.rank
"""


def mistakes() -> Iterator[Any]:
    of_hints = [HINTED + line for line in OF_HINTS.strip().splitlines()]
    for line in [*ON_THE_COMMAND_LINE.strip().splitlines(), *of_hints]:
        words, *parts = (part.strip() for part in line.split(" | "))
        yield pytest.param("", shlex.split(words), parts, id=words)
    for text, parts in IN_THE_FILE.items():
        yield pytest.param(text, [], parts, id=" ".join(text.split()))


@pytest.mark.parametrize(("text", "words", "parts"), list(mistakes()))
def test_a_mistake_is_named_in_one_line(
    write_config: WriteConfig, capsys: pytest.CaptureFixture[str], text: str, words: list[str], parts: list[str]
) -> None:
    arguments = write_config(GOOD + text if text.startswith("[") else text + GOOD)
    assert main([*words, *arguments] if words == ["oops"] else [*arguments, *words]) == 2
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
        "--grpo.delta 0 --grpo.no-async_weight_update --rollout.max_staleness 0",
        "--grpo.delta 0 --job.stage sft --sft.completion_column answer",
        "--grpo.delta 0 --grpo.off_policy_correction icepop",
        "--grpo.delta 0 --grpo.loss_type gspo --grpo.geometric_mask 0.5 2",
        "--grpo.loss_type cispo",
        "--grpo.loss_type sapo --grpo.delta 0",
        "--grpo.loss_type dppo --grpo.off_policy_correction mask",
        "--grpo.loss_type tests.unit_tests.grpo.test_objectives:own_loss --grpo.off_policy_correction mask",
        "--grpo.recompute_old_log_probs",
    ],
)
def test_what_bounds_off_policy_tokens_may_start(write_config: WriteConfig, words: str) -> None:
    load_config([*write_config(), *words.split()])


def test_problems_of_all_kinds_are_reported_together(write_config: WriteConfig) -> None:
    arguments = write_config(more="[optimzer]\nlr = 1.0\n[eval]\ngreedy = 'yes'\n")
    words = ["--training.step", "4", "--training.seed", "x", "--weight_sync.num_slots", "0", "--grpo.group_size", "3"]
    with pytest.raises(ConfigError) as caught:
        load_config([*arguments, *words])
    problems = caught.value.problems
    assert caught.value.exit_code == 2
    keys = ["optimzer", "eval.greedy", "--training.step ", "training.seed", "num_slots", "group_size = 3"]
    assert len(problems) == len(keys)
    for key in keys:
        assert any(key in problem for problem in problems)


def test_a_shipped_file_is_named_only_where_its_name_is_much_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, hint in (("debug_cpy.toml", " (nearest: debug_cpu)"), ("nope.toml", ""), ("smollm_small_cpu", "")):
        assert read_toml(name) == ({}, f"does not exist (looked in {tmp_path}){hint}")


def test_a_config_file_that_cannot_be_read_hides_no_mistake_of_the_command_line(write_config: WriteConfig) -> None:
    write_config()
    with pytest.raises(ConfigError) as caught:
        load_config(["--job.config_file", "nope.toml", "--training.stepz", "1"])
    assert len(caught.value.problems) == 2


TP, SHARD, REPLICATE = (
    f"--parallelism.{name}_degree=" for name in ("tensor_parallel", "data_parallel_shard", "data_parallel_replicate")
)


@pytest.mark.parametrize(
    ("ranks", "words", "problem"),
    [
        (2, [f"{TP}2"], None),
        (4, [f"{TP}4"], r"= 4 .* 2 key-value heads \(allowed: 1, 2\)"),
        (4, [f"{TP}2"], None),
        (3, [f"{TP}2"], "parallelism."),
        (4, [f"{REPLICATE}2"], None),
        (4, [f"{REPLICATE}3"], "parallelism."),
        (8, [f"{REPLICATE}2", f"{SHARD}4"], None),
        (8, [f"{REPLICATE}2", f"{SHARD}2"], "parallelism."),
        (2, [f"{SHARD}0"], "parallelism."),
        (2, [f"{TP}2", "--lora.rank=4", "--lora.dropout=0.1"], "lora.dropout = 0.1"),
        (2, [f"{TP}2", "--lora.rank=4", "--lora.base_bits=4"], "lora.base_bits = 4 .*tensor_parallel_degree > 1"),
    ],
)
def test_layouts(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch, ranks: int, words: list[str], problem: str | None
) -> None:
    arguments = [*write_config(), *words]
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(ConfigError, match=problem) if problem else contextlib.nullcontext():
        load_config(arguments)


def test_ranks_divide_the_key_heads_of_a_gated_delta_net(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = [*write_config(), f"{TP}2"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    sizes = {**SHAPE.to_hf_config(), "model_type": "qwen3_5_text", "num_hidden_layers": 4, "linear_num_value_heads": 12}
    for heads in (4, 3):
        config = json.dumps({**sizes, "linear_num_key_heads": heads})
        (tmp_path / "checkpoint" / "config.json").write_text(config)
        if heads == 4:
            load_config(arguments)
    with pytest.raises(ConfigError, match=r"degree = 2 .* 3 key heads of Gated DeltaNet \(allowed: 1\)"):
        load_config(arguments)


def test_vllm_needs_torchvision_for_qwen_3_5(write_config: WriteConfig, tmp_path: Path) -> None:
    python, packages = tmp_path / "bin" / "python", tmp_path / "lib" / "python3.11" / "site-packages"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    packages.mkdir(parents=True)
    arguments = [*write_config(), "--inference.backend=vllm", "--inference.vllm.python", str(python)]
    load_config(arguments)
    sizes = {**SHAPE.to_hf_config(), "model_type": "qwen3_5_text", "num_hidden_layers": 4}
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(sizes))
    with pytest.raises(ConfigError, match=r'backend = "vllm" .* imports torchvision for qwen3_5_text, which .* lacks'):
        load_config(arguments)
    (packages / "torchvision-0.28.0.dist-info").mkdir()
    load_config(arguments)


@pytest.mark.parametrize(
    "words",
    [
        ["--inference.backend", "vllm", "--inference.vllm.route", "direct"],
        ["--inference.backend", "vllm", "--inference.vllm.route", "agent"],
        ["--inference.backend", "sglang"],
        ["--inference.backend", "colocated"],
    ],
)
def test_adapters_are_for_every_engine_and_probed(
    write_config: WriteConfig, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan.inference.engines.checks.has_gpu", lambda: True)
    config = load_config([*write_config(), "--lora.rank", "4", *words])
    assert config.verification == "probe"


def test_colocated_layouts(write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [*write_config(), "--inference.backend", "colocated"]
    monkeypatch.setenv("WORLD_SIZE", "4")
    for size, fits in ((1, True), (2, True), (4, True), (3, False), (8, False)):
        message = f"tensor_parallel_size = {size} .* must divide the 4 ranks"
        with contextlib.nullcontext() if fits else pytest.raises(ConfigError, match=message):
            words = [*arguments, "--inference.colocated.tensor_parallel_size", str(size)]
            assert load_config(words).inference.engine.tensor_parallel_size == size


def test_sleep_needs_a_gpu_where_the_run_starts(write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*write_config(), "--inference.backend=colocated", "--inference.sleep_level=2"]
    monkeypatch.setattr("torchtitan.inference.engines.checks.has_gpu", lambda: True)
    assert load_config(words).inference.sleep_level == 2
    monkeypatch.setattr("torchtitan.inference.engines.checks.has_gpu", lambda: False)
    with pytest.raises(ConfigError, match="sleep_level = 2 .* without an NVIDIA GPU"):
        load_config(words)
    # Plans are made on any machine.
    assert load_config([*words, "--dry-run"]).inference.sleep_level == 2


def test_servers_sleep_only_where_every_step_waits_for_them(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan.inference.engines.checks.has_gpu", lambda: False)
    waiting = [*write_config(), "--grpo.async_weight_update=false"]
    words = [*write_config(), "--inference.sleep_level=1"]
    blocking = [*words, "--grpo.async_weight_update=false"]
    assert load_config(blocking).inference.sleep_level == 1
    with pytest.raises(ConfigError, match="sleep_level = 1 .*async_weight_update = false"):
        load_config(words)
    for backend in ("vllm", "sglang"):
        foreign = [*waiting, f"--inference.backend={backend}", "--inference.sleep_level=1"]
        with pytest.raises(ConfigError, match="sleep_level = 1 .*without an NVIDIA GPU"):
            load_config(foreign)
        # Servers that run already may have GPUs on machines of their own.
        load_config([*foreign, "--inference.servers", "http://127.0.0.1:8000"])
        monkeypatch.setattr("torchtitan.inference.engines.checks.has_gpu", lambda: True)
        load_config(foreign)
        with pytest.raises(ConfigError, match='transport = "nccl" .*one member of a communicator per GPU'):
            load_config([*foreign, "--weight_sync.transport=nccl"])
        monkeypatch.setattr("torchtitan.inference.engines.checks.has_gpu", lambda: False)
    monkeypatch.setattr("torchtitan.inference.engines.checks.has_gpu", lambda: True)
    adapters = [*blocking, "--inference.sleep_level=2", "--lora.rank=4"]
    with pytest.raises(ConfigError, match="sleep_level = 2 .*at most 1 with lora.rank"):
        load_config(adapters)
    monkeypatch.setenv("WORLD_SIZE", "2")
    load_config(blocking)
    with pytest.raises(ConfigError, match="drain_timeout_s = 70.0 .*must be less than 70, by"):
        load_config([*blocking, "--inference.drain_timeout_s=70"])


def test_a_flavor_without_weights_is_for_runs_that_start_no_actor(write_config: WriteConfig) -> None:
    arguments = [*write_config(), "--model.name", "qwen3", "--model.flavor", "debug"]
    with pytest.raises(ConfigError, match='model.flavor = "debug" is not the model in checkpoint'):
        load_config(arguments)
    Path("run").mkdir()
    Path("run/journal.jsonl").touch()
    for file in ("model.safetensors", "config.json"):
        Path("checkpoint", file).unlink()
        with pytest.raises(ConfigError, match="export one of this flavor first"):
            load_config(arguments)
        load_config([*arguments, "--rollout.replay", "run"])
        load_config([*arguments, "--inference.servers", "http://127.0.0.1:8000"])
    with pytest.raises(ConfigError, match="lora.base_bits = 4 .*random"):
        load_config([*arguments, "--rollout.replay", "run", "--lora.rank", "4", "--lora.base_bits", "4"])
    Path("checkpoint/tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="no tokenizer.json"):
        load_config([*arguments, "--rollout.replay", "run", "--eval.num_prompts", "0"])


def test_the_same_dataset_with_another_split_is_a_fair_evaluation(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan.preflight.tasks.is_installed", lambda name: True)
    arguments = [*write_config(), "--rollout.dataset", "openai/gsm8k:main", "--eval.dataset", "openai/gsm8k:main"]
    load_config(arguments)
    with pytest.raises(ConfigError, match="must not be the prompts of training"):
        load_config([*arguments, "--rollout.dataset", "openai/gsm8k:main[test]"])


def test_packages_that_are_missing_are_named(write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    # Neither is installed. A run with wandb leaves a folder of that name where it was started, which imports as well.
    arguments = write_config()
    for name in ("datasets", "wandb"):
        Path(name).mkdir()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: PathFinder.find_spec(name, [str(Path.cwd())]))
    with pytest.raises(ConfigError) as caught:
        load_config([*arguments, "--rollout.dataset", "openai/gsm8k", "--metrics.loggers", "wandb"])
    extras = [re.findall(r"EXTRAS=(\w+)", problem) for problem in caught.value.problems]
    assert extras == [["data"], ["wandb"]]


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
        ("json:loads", "no row of the dataset has a column 's'"),
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
