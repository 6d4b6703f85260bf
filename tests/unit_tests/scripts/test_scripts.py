"""Scripts for engines and clusters, as far as they go without either: what they would start, and what they refuse."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.judge_runs import main as judge
from tests.patience import PATIENCE_S
from tests.unit_tests.conftest import write_stubs
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.models.shape.checkpoint_shape import find_flavor
from torchtitan.preflight.plan import tensor_parallel_size

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = sorted([*ROOT.glob("*.sh"), *ROOT.glob("scripts/*.sh"), *ROOT.glob("scripts/engines/*.sh")])


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / "scripts/grpo_multinode.slurm"], ids=lambda path: path.name)
def test_every_script_can_be_read_by_bash(script: Path) -> None:
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def run(command: list[str | Path], **environment: str) -> subprocess.CompletedProcess[str]:
    everything = {name: value for name, value in os.environ.items() if name != "TORCHTITAN_ACTOR_TOKEN"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=840, check=False, cwd=ROOT, env={**everything, **environment}
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(find_flavor("qwen3", "debug").to_hf_config()))
    write_stubs(folder)
    return folder


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_server_is_our_agent_with_the_engines_options_behind(engine: str, model: Path) -> None:
    from torchtitan.inference.engines.sidecar.__main__ import parse_arguments

    script = ROOT / f"scripts/launch_{engine}_server.sh"
    words: list[str | Path] = [script, "--dry-run", "--model", model, "--port=8123", "--dtype", "bfloat16", "--"]
    done = run([*words, "--seed", "3", "--some-json", '{"a": 1}'])
    assert done.returncode == 0, done.stderr
    command = shlex.split(done.stderr.removeprefix(f"[{engine}]"))
    arguments = command[command.index("torchtitan.inference.engines.sidecar") + 1 :]
    os.environ["TORCHTITAN_ACTOR_TOKEN"] = "x"
    try:
        parsed = parse_arguments(arguments)
    finally:
        del os.environ["TORCHTITAN_ACTOR_TOKEN"]
    assert (parsed.engine, parsed.model, parsed.port, parsed.dtype) == (engine, str(model), 8123, "bfloat16")
    assert parsed.passed == ["--seed", "3", "--some-json", '{"a": 1}']
    # The token is no part of a command line, which everybody can read.
    assert "x" not in arguments and parsed.token_env == "TORCHTITAN_ACTOR_TOKEN"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "/nowhere"], "must be a Hugging Face checkpoint directory"),
        (["--model"], "--model needs a value"),
        ([], "--model (nothing)"),
        (["--model", "MODEL", "--host", "0.0.0.0"], "accepts other machines: set the same TORCHTITAN_ACTOR_TOKEN"),
    ],
)
def test_a_server_that_cannot_or_must_not_be_started(words: list[str], message: str, model: Path) -> None:
    given = [str(model) if word == "MODEL" else word for word in words]
    done = run([ROOT / "scripts/launch_vllm_server.sh", "--dry-run", *given])
    assert done.returncode == 2 and message in done.stderr


SRUN = """#!/usr/bin/env python3
# Notes its words, and stays until it is told to go where it runs a server.
import os, signal, sys, time
with open(os.environ["CALLS"], "a") as file:
    file.write(repr([sys.argv[1:], os.environ.get("TORCHTITAN_ACTOR_TOKEN", "")]) + "\\n")
if any("launch_" in word for word in sys.argv):
    def leave(*_):
        with open(os.environ["CALLS"], "a") as file:
            file.write("stopped\\n")
        sys.exit(0)
    signal.signal(signal.SIGTERM, leave)
    time.sleep(60)
def save(*_):
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
if "SRUN_SIGNALS" in os.environ:  # Slurm, before the time is over
    os.kill(os.getppid(), signal.SIGUSR1)
    time.sleep(60)
time.sleep(1.5)
sys.exit(int(os.environ.get("SRUN_EXIT", "0")))
"""


def slurm(folder: Path, words: list[str], **environment: str) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    """Run the batch script with an srun that only notes its words; what was noted."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "srun").write_text(SRUN)
    (programs / "scontrol").write_text(
        '#!/bin/sh\nif [ "$1" = requeue ]; then echo "requeued=$2" >&2; else echo "$3" | tr , "\\n"; fi\n'
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    variables = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "CALLS": str(folder / "calls"),
        "PYTHON": sys.executable,
        "LOG_FOLDER": str(folder / "logs"),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "gpu1,gpu2,gpu3",
        "GPUS_PER_NODE": "4",
    }
    done = run(["bash", ROOT / "scripts/grpo_multinode.slurm", *words], **{**variables, **environment})
    calls = folder / "calls"
    lines = calls.read_text().splitlines() if calls.exists() else []
    return done, [line if line == "stopped" else eval(line) for line in lines]


@pytest.fixture
def config(tmp_path: Path, model: Path) -> Path:
    file = tmp_path / "job.toml"
    batch = "global_batch_size = 64\nseq_len = 64\ntokens_per_micro_batch = 256"
    file.write_text(
        f'[inference]\nbackend = "vllm"\ndtype = "bfloat16"\nupdate_mode = "drain"\n'
        f'[inference.vllm]\npython = "{sys.executable}"\n[inference.vllm.args]\nseed = 3\n'
        f'[model]\nhf_assets_path = "{model}"\n[training]\n{batch}\n[rollout]\nmax_completion_tokens = 32\n'
        "[grpo]\nrecompute_old_log_probs = true\n"
    )
    return file


@pytest.mark.slow
def test_training_and_inference_nodes_come_from_one_allocation(tmp_path: Path, model: Path, config: Path) -> None:
    from torchtitan.inference.engines.sidecar.__main__ import parse_arguments

    done, calls = slurm(
        tmp_path, ["--training.steps", "9", "--inference.vllm.tensor_parallel_size", "2"], CONFIG_FILE=str(config),
        TRAIN_NODES="2", SLURM_CPUS_ON_NODE="64",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # The servers' steps are told to end when the training has, and nothing else is.
    assert calls.count("stopped") == 2
    words = [call for call in calls if call != "stopped"]
    assert len({token for _, token in words}) == 1 and len(words[0][1]) > 20
    servers = sorted(
        (command for command, _ in words if "scripts/launch_vllm_server.sh" in command),
        key=lambda command: command[command.index("--port") + 1],
    )
    for number, server in enumerate(servers):
        assert server[server.index("--nodelist") + 1] == server[server.index("--host") + 1] == "gpu3"
        assert server[server.index("--port") + 1] == str(8000 + number)
        assert f"CUDA_VISIBLE_DEVICES={['0,1', '2,3'][number]}" in server
        assert server[server.index("--tensor-parallel-size") + 1] == "2"
        assert server[server.index("--cpus-per-task") + 1] == "32" and server[server.index("--cpu-bind") + 1] == "none"
        # What the run says counts here, too; the engine is the one that was installed before.
        arguments = parse_arguments(["--engine", "vllm", *server[server.index("--host") :]])
        assert (arguments.model, arguments.dtype, arguments.max_length) == (str(model), "bfloat16", 64)
        assert (arguments.update_mode, arguments.passed, arguments.python) == ("drain", ["--seed", "3"], sys.executable)
    (training,) = [command for command, _ in words if "torchtitan.grpo_train" in command]
    assert training[training.index("--nodelist") + 1] == "gpu1,gpu2"
    assert training[training.index("--cpus-per-task") + 1] == "64" and "--cpu-bind" in training
    assert training[training.index("--nnodes") + 1] == "2" and training[training.index("--nproc-per-node") + 1] == "4"
    assert training[training.index("--master-addr") + 1] == "gpu1"
    options = training[training.index("torchtitan.grpo_train") + 1 :]
    assert options[options.index("--inference.servers") + 1] == "slurm:gpu3:8000-8001"
    assert options[-4:-2] == ["--training.steps", "9"] and options[options.index("--weight_sync.host") + 1] == "gpu1"


@pytest.mark.slow
def test_rank_0_is_on_the_node_whose_address_the_run_gives(tmp_path: Path, model: Path, config: Path) -> None:
    nodes = ["gpu8", "gpu9", "gpu10", "gpu11"]  # sorted as words, gpu10 would be first
    done, calls = slurm(tmp_path, [], CONFIG_FILE=str(config), SLURM_JOB_NODELIST=",".join(nodes), TRAIN_NODES="3")
    assert done.returncode == 0, done.stderr
    (training,) = [line for line, _ in (call for call in calls if call != "stopped") if "torchtitan.grpo_train" in line]
    command = training[training.index("bash") :]
    script = tmp_path / "said"
    script.write_text('#!/bin/sh\necho "$@"\n')
    script.chmod(0o755)
    command[command.index(sys.executable)] = str(script)
    for rank, node in enumerate(nodes):
        started = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "SLURMD_NODENAME": node})
        if node == "gpu11":  # serves
            assert started.returncode == 2 and "gpu11 is not one of the training nodes" in started.stderr
            continue
        words = started.stdout.split()
        assert words[words.index("--node-rank") + 1] == str(rank)
        assert words[words.index("--master-addr") + 1] == words[words.index("--weight_sync.host") + 1] == "gpu8"


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "words"), [("1:3", 3), ("3:1", 0), ("0:2", 0), ("2:9", 0), ("1:", 0)])
def test_a_range_of_training_nodes_survives_the_loss_of_some(
    asked: str, words: int, tmp_path: Path, model: Path, config: Path
) -> None:
    """The first by name, which is rank 0's, is also where they meet."""
    nodes = "gpu9,gpu10,gpu11,gpu12"
    done, calls = slurm(tmp_path, [], CONFIG_FILE=str(config), SLURM_JOB_NODELIST=nodes, TRAIN_NODES=asked)
    if not words:
        assert done.returncode == 2 and "TRAIN_NODES=" in done.stderr and not calls
        return
    (training,) = [line for line, _ in (call for call in calls if call != "stopped") if "torchtitan.grpo_train" in line]
    assert (
        training[training.index("--nnodes") + 1] == "1:3"
        and training[training.index("--nodelist") + 1] == "gpu10,gpu11,gpu9"
    )
    assert training[training.index("--rdzv-endpoint") + 1] == "gpu10:29400" and "--no-kill" in training
    assert training[training.index("--weight_sync.host") + 1] == "gpu10" and "--kill-on-bad-exit=0" in training


@pytest.mark.slow
def test_a_failed_training_ends_the_servers_and_the_job(tmp_path: Path, model: Path, config: Path) -> None:
    done, calls = slurm(tmp_path, [], CONFIG_FILE=str(config), SRUN_EXIT="7")
    assert done.returncode == 7 and calls.count("stopped") == 1
    assert "requeued" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("before", "again"), [("0", True), ("20", False)])
def test_when_its_time_is_over_the_run_saves_and_the_job_is_queued_again(
    before: str, again: bool, tmp_path: Path, config: Path
) -> None:
    variables = {"SRUN_SIGNALS": "1", "SLURM_RESTART_COUNT": before, "TRAIN_NODES": "3"}
    done, ((training, _),) = slurm(tmp_path, [], CONFIG_FILE=str(config), **variables)
    assert done.returncode == 143 and ("requeued=77" in done.stderr) == again, done.stderr
    # The next time it is the same launch, and goes on where it was saved.
    assert training[training.index("--max-restarts") + 1] == "3"
    assert training[training.index("--checkpoint.enable") + 1] == "true"


@pytest.mark.slow
def test_colocated_runs_use_all_nodes_for_training(tmp_path: Path, config: Path) -> None:
    done, calls = slurm(tmp_path, [], CONFIG_FILE=str(config), TRAIN_NODES="3")
    assert done.returncode == 0, done.stderr
    ((training, token),) = calls
    assert training[training.index("--nodes") + 1] == "3" and "--inference.servers" not in training and token == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (["--grpo.group_size", "7"], {}, "group_size = 7"),
        ([], {"TRAIN_NODES": "4"}, "TRAIN_NODES=4 must be 1 to 3, the number of nodes in the allocation"),
        ([], {"MAX_REQUEUES": "many", "TRAIN_NODES": "3"}, "MAX_REQUEUES=many is not a number"),
        (["--inference.vllm.tensor_parallel_size", "3"], {}, "can be shared by [1, 2, 4] GPUs"),
        (["--inference.vllm.python", "/nowhere/python"], {}, "is not a program"),
        ([], {"GPUS_PER_NODE": "eight"}, "is not a number of GPUs"),
        (["--inference.backend", "embedded", "--inference.vllm.args.x", "1"], {}, "has no effect"),
    ],
)
def test_mistakes_end_the_job_before_anything_is_started(
    words: list[str], environment: dict[str, str], message: str, tmp_path: Path, config: Path
) -> None:
    done, calls = slurm(tmp_path, words, **{"CONFIG_FILE": str(config), **environment})
    assert done.returncode != 0 and message in done.stderr and calls == []


@pytest.mark.parametrize(
    ("flavor", "gigabytes", "share"),
    [
        ("2.5-7B", 80, 1),
        ("2.5-7B", 24, 2),
        ("2.5-72B", 80, 8),
        ("2.5-72B", 180, 2),
        ("2.5-72B", None, 8),
        ("2.5-7B", None, 4),
    ],
)
def test_servers_get_as_many_gpus_as_heads_and_size_ask_for(flavor: str, gigabytes: int | None, share: int) -> None:
    """14 and 135 GiB in bf16; 28 heads are not for 8 GPUs."""
    config = JobConfig()
    config.inference.dtype = "bfloat16"
    memory = None if gigabytes is None else gigabytes << 30
    assert tensor_parallel_size(config, find_flavor("qwen2", flavor), 8, memory) == share
    with pytest.raises(UserError, match="135 GiB .* do not fit"):
        tensor_parallel_size(config, find_flavor("qwen2", "2.5-72B"), 8, 24 << 30)


def test_nothing_is_ever_killed_by_its_name() -> None:
    for script in (*SCRIPTS, ROOT / "scripts/grpo_multinode.slurm"):
        text = script.read_text()
        assert not any(word in text for word in ("pkill", "killall", "kill -9", "-KILL")), script


def write_run(folder: Path, rates: list[float], events: list[dict[str, Any]], probes: bool = True) -> Path:
    folder.mkdir(parents=True)
    rows = [
        {"step": step, "policy_version": step, "tokens_per_s": rate, "inference/probed_version": probes * (step - 1.0)}
        for step, rate in enumerate(rates, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_runs_are_judged_by_their_weights_and_by_what_not_waiting_gains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probed = {"kind": "weights_probed", "actor": "actor-0", "version": 0, "difference": 1e-6}
    broken = {"kind": "parity_guard_failed", "reason": "KeyError(3)"}
    differs = {"kind": "weights_differ", "actor": "actor-0", "version": 3, "difference": 0.4}
    waiting = write_run(tmp_path / "waiting", [1, 1, 1, 100, 100, 110, 90, 100, 100, 100], [probed])
    for name, rates, events, least, code, output in (
        ("faster", [1, 1, 150, 150, 150], [probed], 1.0, 0, "gain of not waiting: 1.50×"),
        ("slower", [90] * 5, [probed], 1.0, 1, "0.90× (at least 1: NO)"),
        ("slower is allowed", [90] * 5, [probed], 0.0, 0, "weights right"),
        ("stale", [150] * 5, [probed, differs], 1.0, 1, "actor-0 did not hold version 3"),
        ("no guard", [150] * 5, [probed, broken], 1.0, 1, "the comparison failed: KeyError(3)"),
        ("the first only", [150] * 5, [probed], 1.0, 1, "no version after the first"),
        ("never asked", [150] * 5, [], 1.0, 1, "no actor was ever compared"),
    ):
        rates = [float(rate) for rate in rates]
        run_folder = write_run(tmp_path / name, rates, events, probes=name != "the first only")
        arguments = ["--waiting", str(waiting), "--not-waiting", str(run_folder), "--least-gain", str(least)]
        assert judge(arguments) == code, name
        assert output in capsys.readouterr().out
