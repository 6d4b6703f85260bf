"""Whole training runs with vLLM inside the trainer's ranks."""

from __future__ import annotations

import json
import math
import signal
import tempfile
from pathlib import Path

import pytest

from tests.processes import Processes
from tests.runs import RUN_SECONDS, Run
from torchtitan.inference.serving.middleware import FOLDER_PREFIX

pytestmark = pytest.mark.timeout(2 * RUN_SECONDS)
STEPS, SAMPLES = 3, 256
SAME_SAMPLES = ("reward/mean", "reward/std", "completion/length_mean")


def start(
    processes: Processes, python: Path, checkpoint: Path, dump: Path, *options: str, ranks: int = 1, **environment: str
) -> Run:
    config, module = "debug_cpu_vllm_colocate", "tests.engines.telling_train"
    options = ("--optimizer.lr", "2e-4", "--training.global_batch_size", str(SAMPLES), *options)
    return Run(processes, config, checkpoint, dump, *options, ranks=ranks, python=python, module=module, **environment)


@pytest.fixture(scope="module")
def one_rank(
    vllm_python: Path, debug_checkpoint: Path, module_processes: Processes, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    options = ["--training.steps", str(STEPS), "--eval.interval", str(STEPS), "--eval.num_prompts", "32"]
    dump = tmp_path_factory.mktemp("one-rank")
    run = start(module_processes, vllm_python, debug_checkpoint, dump, *options, "--eval.greedy", "false")
    run.end()
    return run


def test_every_batch_is_of_the_newest_version(one_rank: Run) -> None:
    """What the engine says of its tokens is what the trainer computes: the two never part. So it learns as a run with
    the embedded engine does, whose rewards test_python_door.py looks at."""
    assert [row["step"] for row in one_rank.steps()] == list(range(1, STEPS + 1))
    evaluations = [row for row in one_rank.rows() if "eval/version" in row]
    assert [row["eval/version"] for row in evaluations] == [0, STEPS]
    assert all(row["eval/redone"] == 0 for row in evaluations)
    for row in one_rank.steps():
        assert row["grad_norm"] > 0
        assert row["staleness/max"] == 0
        assert row["mismatch_kl/same_version"] < 1e-9
        assert row["weight_sync/versions_published"] == row["step"] + 1
        assert row["time/generate_s"] > 0


def test_two_ranks_share_one_engine_save_when_asked_to_stop_and_leave_nothing(
    one_rank: Run, vllm_python: Path, debug_checkpoint: Path, processes: Processes, tmp_path: Path
) -> None:
    """FSDP2 over two ranks, whose engine is tensor parallel: the same samples as of one rank, the same rewards.

    A signal in the middle: the checkpoint is written, and all processes, sockets and shared memory are gone. Until then
    it has computed on the threads that it was told to, though vLLM takes torch's function for that away.
    """
    options = ["--inference.colocated.tensor_parallel_size", "2", "--eval.num_prompts", "0", "--training.steps", "1000"]
    # The environment says one.
    options += ["--training.threads", "2"]
    alone = one_rank.steps()
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        run = start(processes, vllm_python, debug_checkpoint, tmp_path, *options, ranks=2, TMPDIR=temporary)

        def sockets() -> list[Path]:
            return [path for path in Path(temporary).rglob("*") if path.is_socket()]

        run.wait(lambda: bool(sockets()))
        assert {path.parent.name[: len(FOLDER_PREFIX)] for path in sockets()} == {FOLDER_PREFIX}
        run.wait(lambda: len(run.steps()) >= len(alone))
        run.end(128 + signal.SIGTERM, by=signal.SIGTERM)
        assert sockets() == [] and not list(Path(temporary).glob(f"{FOLDER_PREFIX}*"))
    assert "Traceback" not in run.log() and "terminate called" not in run.log()
    assert run.log().count("threads of torch: 2") == 2
    assert list((run.folder / "checkpoint").glob("step-*"))
    epoch = json.loads((run.folder / "epochs.jsonl").read_text().splitlines()[0])["epoch"]
    assert list(Path("/dev/shm").glob(f"{epoch}*")) == []

    rows = run.steps()[: len(alone)]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    # Sums in another order: with the same weights one of the samples may fall the other way, whose reward is 0 to 1.
    assert rows[0]["reward/mean"] == pytest.approx(alone[0]["reward/mean"], rel=0, abs=1.5 / SAMPLES)
    if all(rows[0][name] == pytest.approx(alone[0][name], abs=1e-6) for name in SAME_SAMPLES):
        assert rows[0]["loss"] == pytest.approx(alone[0]["loss"], abs=1e-5)
    for row, other in zip(rows, alone, strict=True):
        # Later more and more do: at worst these are samples of their own, and their means four standard errors apart.
        error = other["reward/std"] * math.sqrt(2 / SAMPLES)
        assert row["reward/mean"] == pytest.approx(other["reward/mean"], rel=0, abs=4 * error)
        assert row["mismatch_kl/same_version"] < 1e-9
