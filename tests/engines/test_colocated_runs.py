"""Whole training runs with vLLM inside the trainer's ranks."""

from __future__ import annotations

import json
import math
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engines.processes import ROOT, Processes
from tests.patience import PATIENCE_S
from torchtitan.inference.engine_folder import PREFIX

RUN_SECONDS = 300.0
STEPS = 40
# In a batch of that configuration.
SAMPLES = 512
SAME_SAMPLES = ("reward/mean", "reward/std", "completion/length_mean")


def start(
    processes: Processes,
    python: Path,
    checkpoint: Path,
    dump: Path,
    ranks: int,
    steps: int,
    *options: str,
    threads: int = 1,
    **environment: str,
) -> None:
    """The run of train_configs/debug_cpu_vllm_colocate.toml on that many ranks."""
    processes.start(
        "run",
        [
            python, "-m", "torchtitan.utils.launch", "--standalone", "--nproc-per-node", str(ranks),
            "-m", "tests.engines.telling_train",
            "--job.config_file", ROOT / "train_configs" / "debug_cpu_vllm_colocate.toml",
            "--model.hf_assets_path", checkpoint,
            "--job.dump_folder", dump,
            "--training.steps", str(steps),
            "--training.threads", str(threads),
            "--checkpoint.interval", "1000",
            "--metrics.log_freq", "1",
            *options,
        ],
        **environment,
    )  # fmt: skip


def finish(processes: Processes, dump: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl after a run that ended well."""
    run = processes._running["run"]
    assert run.wait(RUN_SECONDS) == 0, processes.tail("run")
    return rows_of(dump)


def rows_of(dump: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (dump / "latest" / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def one_rank(
    vllm_python: Path, debug_checkpoint: Path, module_processes: Processes, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    dump = tmp_path_factory.mktemp("one-rank")
    evaluation = ["--eval.interval", str(STEPS), "--eval.num_prompts", "500", "--eval.greedy", "false"]
    start(module_processes, vllm_python, debug_checkpoint, dump, 1, STEPS, *evaluation)
    return finish(module_processes, dump)


def test_reward_rises(one_rank: list[dict[str, Any]]) -> None:
    """Also on held-out prompts, where both versions draw with the same random numbers."""
    before, after = [row for row in one_rank if "eval/version" in row]
    assert (before["eval/version"], after["eval/version"]) == (0, STEPS)
    assert after["eval/pass@1"] >= before["eval/pass@1"] + 0.015
    rewards = [row["reward/mean"] for row in one_rank if "reward/mean" in row]
    assert sum(rewards[-10:]) > sum(rewards[:10])
    assert before["eval/redone"] == after["eval/redone"] == 0


def test_every_batch_is_of_the_newest_version(one_rank: list[dict[str, Any]]) -> None:
    """What the engine says of its tokens is what the trainer computes: the two never part."""
    steps = [row for row in one_rank if "reward/mean" in row]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    for row in steps:
        assert row["staleness/max"] == 0
        assert row["mismatch_kl/same_version"] < 1e-9
        assert row["weight_sync/versions_published"] == row["step"] + 1
        assert row["time/generate_s"] > 0


def test_two_ranks_share_one_engine(
    one_rank: list[dict[str, Any]], vllm_python: Path, debug_checkpoint: Path, processes: Processes, tmp_path: Path
) -> None:
    """FSDP2 over two ranks, whose engine is tensor parallel: the same samples as of one rank, the same rewards."""
    options = ["--inference.tensor_parallel_size", "2", "--eval.enable", "false"]
    alone = [row for row in one_rank if "reward/mean" in row][:6]
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        start(processes, vllm_python, debug_checkpoint, tmp_path, 2, 6, *options, TMPDIR=temporary)

        def sockets() -> list[Path]:
            return [path for path in Path(temporary).rglob("*") if path.is_socket()]

        processes.wait("run", lambda: bool(sockets()), RUN_SECONDS)
        assert {path.parent.name[: len(PREFIX)] for path in sockets()} == {PREFIX}
        rows = finish(processes, tmp_path)
        assert sockets() == [] and not list(Path(temporary).glob(f"{PREFIX}*"))
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    # Sums in another order: with the same weights one of the samples may fall the other way, whose reward is 0 to 1.
    assert rows[0]["reward/mean"] == pytest.approx(alone[0]["reward/mean"], rel=0, abs=1.5 / SAMPLES)
    if all(rows[0][name] == pytest.approx(alone[0][name], abs=1e-6) for name in SAME_SAMPLES):
        assert rows[0]["loss"] == pytest.approx(alone[0]["loss"], abs=1e-5)
    for row, other in zip(rows, alone, strict=True):
        # Later more and more do: at worst these are samples of their own, and their means three standard errors apart.
        error = other["reward/std"] * math.sqrt(2 / SAMPLES)
        assert row["reward/mean"] == pytest.approx(other["reward/mean"], rel=0, abs=3 * error)
        assert row["mismatch_kl/same_version"] < 1e-9


def test_asked_to_stop_it_saves_and_leaves_nothing(
    vllm_python: Path, debug_checkpoint: Path, processes: Processes, tmp_path: Path
) -> None:
    """A signal in the middle: the checkpoint is written, and all processes and shared memory are gone.

    Until then it has computed on the threads that it was told to, though vLLM takes torch's function for that away.
    """
    # The environment says one.
    start(processes, vllm_python, debug_checkpoint, tmp_path, 1, 1000, "--eval.enable", "false", threads=2)
    metrics = tmp_path / "latest" / "metrics.jsonl"
    processes.wait("run", lambda: metrics.exists() and len(rows_of(tmp_path)) >= 2, RUN_SECONDS)
    run = processes._running["run"]
    children = psutil.Process(run.pid).children(recursive=True)
    os.kill(run.pid, signal.SIGTERM)
    code = run.wait(PATIENCE_S)
    assert code == 128 + signal.SIGTERM, processes.tail("run")
    text = processes.log("run").read_text()
    assert "Traceback" not in text
    assert "threads of torch: 2" in text
    assert "terminate called" not in text
    assert [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []
    assert list((tmp_path / "latest" / "checkpoint").glob("step-*"))
    epoch = json.loads((tmp_path / "latest" / "epochs.jsonl").read_text().splitlines()[0])["epoch"]
    assert list(Path("/dev/shm").glob(f"{epoch}*")) == []
