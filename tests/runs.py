"""Whole training runs of the configurations in train_configs/, and what they have to show."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.patience import PATIENCE_S
from tests.processes import ROOT, Processes
from torchtitan.utils.json_lines import read_json_lines

# From the start to the end of a run. Only a failure takes so long.
RUN_SECONDS = 900.0
# Options of a run of a few steps with one actor, whose reward random weights earn too, and which exports its end.
BRIEF = (
    "--training.global_batch_size", "64", "--grpo.num_minibatches", "1", "--eval.num_prompts", "0",
    "--rewards.functions", "tests.unit_tests.rollout.reward_examples:share_of_digits",
    "--inference.num_actors", "1", "--inference.threads_per_actor", "1", "--checkpoint.last_save_in_hf", "true",
    "--metrics.loggers", "[]",
)  # fmt: skip


class Run:
    """A run in a process group of its own: by the launcher, as ./run_grpo.sh starts it, or without (ranks = 0)."""

    def __init__(
        self,
        processes: Processes,
        config: str,
        checkpoint: Path,
        dump: Path,
        *options: str | Path,
        ranks: int = 0,
        restarts: int = 0,
        python: str | Path = sys.executable,
        module: str = "torchtitan.grpo_train",
        **environment: str,
    ):
        """A constant rate makes the first steps of a long run those of a short one. `options` come last, and count."""
        self._processes, self.latest = processes, dump / "latest"
        launcher = ["torchtitan.utils.launch", "--standalone", "--nproc-per-node", str(ranks)]
        launcher += ["--max-restarts", str(restarts), "-m"]
        command = [
            python, "-m", *(launcher if ranks else []), module,
            "--job.config_file", ROOT / "train_configs" / f"{config}.toml",
            "--job.dump_folder", dump,
            "--model.hf_assets_path", checkpoint,
            "--training.threads", "1",
            "--lr_scheduler.warmup_steps", "2",
            "--lr_scheduler.decay_type", "constant",
            "--checkpoint.interval", "1000",
            "--metrics.log_freq", "1",
            *options,
        ]  # fmt: skip
        self._started = processes.start("run", command, **environment)
        self.process = psutil.Process(self._started.pid)

    @property
    def folder(self) -> Path:
        """Where it writes; waits until that is there."""
        self.wait(self.latest.exists)
        return self.latest.resolve()

    def rows(self) -> list[dict[str, Any]]:
        """All that stands in metrics.jsonl."""
        return read_json_lines(self.latest / "metrics.jsonl")

    def steps(self) -> list[dict[str, Any]]:
        """Its rows of training steps."""
        return [row for row in self.rows() if "loss" in row]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_json_lines(self.latest / "events.jsonl") if event["kind"] == kind]

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until condition() holds; fails where the run ends before."""
        if not condition():
            self._processes.wait("run", condition, RUN_SECONDS)

    def log(self) -> str:
        return self._processes.log("run").read_text(errors="replace")

    def end(self, code: int = 0, by: signal.Signals | None = None) -> None:
        """It ends with that code, by itself or `by` a signal, and nothing of it is left."""
        children = self.process.children(recursive=True)
        if by is not None:
            self.process.send_signal(by)
        assert self._started.wait(RUN_SECONDS) == code, self._processes.tail("run")
        _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
        assert alive == []
