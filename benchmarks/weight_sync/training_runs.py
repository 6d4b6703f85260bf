"""Whole training runs of the debug task, with something beside them, and what the synchronisation cost them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from torchtitan.inference.actor_client import TOKEN_VARIABLE
from torchtitan.report.sync_metrics import FOLDER, JOURNAL_FILE
from torchtitan.utils.child_process import child_environment
from torchtitan.utils.json_lines import read_json_lines

RUN_SECONDS = 3600.0
# What a run beside hostile or passing actors may lose against one without them.
COMPARED_BARS = {
    "versions_skipped": ("<=", 0.0),
    "pass_at_1_loss": ("<=", 0.04),
    "stall_p99_more_ms": ("<=", 5.0),
}


def debug_settings(steps: int, batch: int, quick: bool) -> dict[str, object]:
    """Configuration keys of the default task on one thread, with two embedded actors and an evaluation at the end."""
    settings: dict[str, object] = {
        "job.config_file": common.REPOSITORY / "train_configs" / "debug_cpu.toml",
        "model.hf_assets_path": common.debug_checkpoint(),
        "training.steps": steps,
        "training.global_batch_size": batch,
        "training.threads": 1,
        "inference.num_actors": 2,
        "eval.interval": 0,
        "checkpoint.enable": "false",
    }
    return {**settings, "eval.num_prompts": 8} if quick else settings


def train_beside(
    folder: Path,
    settings: Mapping[str, object],
    beside: Callable[[subprocess.Popen[bytes]], None] | None = None,
    launcher: Sequence[str] = (),
) -> Path:
    """Run it in this new folder; returns the folder of its files. beside: what is done from its start, may return at
    any time. launcher: what stands before the run's own words, say for several ranks. Ends the benchmark with the run's
    last words where its exit code is not 0."""
    folder.mkdir()
    words = [str(word) for key, value in settings.items() for word in (f"--{key}", value)]
    command = [sys.executable, *launcher, *common.TRAIN, *words, "--job.dump_folder", str(folder)]
    log_file = folder / "run.log"
    # Not to the terminal: the run names every actor that it loses.
    with (
        log_file.open("wb") as log,
        subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            cwd=common.REPOSITORY,
            env=child_environment(1, secrets=[TOKEN_VARIABLE]),
        ) as run,
    ):
        try:
            if beside is not None:
                beside(run)
            code = run.wait(RUN_SECONDS)
        finally:
            run.terminate()
    if code:
        raise SystemExit(f"exit code {code}:\n{log_file.read_text(errors='replace')[-4000:]}")
    return folder / "latest"


def journal(latest: Path) -> list[dict[str, Any]]:
    """The registry's lines."""
    return read_json_lines(latest / FOLDER / JOURNAL_FILE)


def figures_of(latest: Path) -> dict[str, float]:
    """What a run has learned, and what the synchronisation took of its steps."""
    rows = read_json_lines(latest / "metrics.jsonl")
    trained = [row for row in rows if "loss" in row]
    stalls = [1e3 * row["time/sync_stall_s"] for row in trained]
    return {
        "steps": len(trained),
        "pass_at_1": next(row["eval/pass@1"] for row in reversed(rows) if "eval/version" in row),
        "versions_skipped": trained[-1]["weight_sync/versions_skipped"],
        "stall_p99_ms": common.percentile(stalls, 0.99),
        "stall_max_ms": max(stalls),
        "step_p50_s": common.percentile([row["time/step_s"] for row in trained], 0.5),
    }


def compared(figures: Mapping[str, float], without: Mapping[str, float]) -> dict[str, float]:
    """A run's figures beside those of the run without what was done to it, and their differences."""
    return {
        **figures,
        **{f"{key}_without": value for key, value in without.items()},
        "pass_at_1_loss": without["pass_at_1"] - figures["pass_at_1"],
        "stall_p99_more_ms": figures["stall_p99_ms"] - without["stall_p99_ms"],
    }
