"""Trainer ranks that are killed, frozen and told to go: does the run end well, and how much does it train again?

Two ranks on the CPU learn the built-in addition by train_configs/debug_cpu.toml, with an actor that is a server of its
own. At five random steps a rank gets SIGKILL, SIGSTOP or SIGTERM. Nothing else is done to help: the launcher starts the
ranks again, they go on from the newest checkpoint, and the server joins them.

    python benchmarks/rank_deaths.py --json
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

import psutil  # noqa: E402

from benchmarks import common  # noqa: E402
from torchtitan.inference.actor_client import TOKEN_VARIABLE  # noqa: E402
from torchtitan.rollout.flow.journal import JOURNAL_NAME, read_records  # noqa: E402
from torchtitan.utils.json_lines import read_json_lines  # noqa: E402

DEATHS = (("SIGKILL", 1), ("SIGSTOP", 1), ("SIGTERM", 0), ("SIGKILL", 0), ("SIGSTOP", 0))
BARS = {
    "exit_code": ("<=", 0.0),
    "most_steps_again": ("<=", 20.0),
    "steps_again_of_sigterm": ("<=", 0.0),
    "server_lived": (">=", 1.0),
    "pass_at_1_after": (">=", 0.95),
}
RUN_SECONDS, RESTART_SECONDS = 2400.0, 300.0
Deaths = tuple[tuple[str, int], ...]


class Run:
    """The launcher with two ranks, and the server, both in this folder."""

    def __init__(self, folder: Path, model: Path, steps: int, interval: int, restarts: int, options: list[str]):
        self.folder, self.latest = folder, folder / "runs" / "latest"
        token = secrets.token_urlsafe(16)
        with (folder / "server.log").open("ab") as log:
            words = ("--require-version", "--max-length", 32)
            self.server, url = common.embedded_server(folder, model, token, *words, output=log)
        command = (
            sys.executable, "-m", "torchtitan.utils.launch", "--standalone", "--nproc-per-node", 2,
            "--max-restarts", restarts, "-m", "torchtitan.grpo_train",
            "--job.config_file", REPOSITORY / "train_configs" / "debug_cpu.toml", "--job.dump_folder", folder / "runs",
            "--model.hf_assets_path", model, "--training.steps", steps, "--training.threads", 1,
            "--checkpoint.interval", interval, "--comm.train_timeout_seconds", 10,
            "--inference.servers", url, "--inference.num_actors", "0",
            "--eval.interval", 0, "--metrics.log_freq", 10, *options,
        )  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), TOKEN_VARIABLE: token}
        with (folder / "run.log").open("ab") as log:
            self.process = subprocess.Popen(
                [str(word) for word in command], stdout=log, stderr=log, env=environment, cwd=REPOSITORY
            )

    def rows(self) -> list[dict[str, Any]]:
        return read_json_lines(self.latest / "metrics.jsonl")

    def step(self) -> int:
        """The last one that was trained."""
        return max((row["step"] for row in self.rows()), default=0)

    def restarts(self) -> list[dict[str, Any]]:
        path = self.latest / JOURNAL_NAME
        records = [record for _, record in read_records(path)] if path.is_file() else []
        return [record for record in records if record["record"] == "restart"]

    def strike(self, name: str, rank: int) -> None:
        """Send a signal to a rank."""
        ranks = [
            child
            for child in psutil.Process(self.process.pid).children(recursive=True)
            if "torchtitan.grpo_train" in child.cmdline() and child.environ().get("RANK") == str(rank)
        ]
        ranks[0].send_signal(getattr(signal, name))

    def wait(self, seconds: float, what: str, condition: Any) -> None:
        """Until condition(); ends the benchmark with the run's last words where the run ends before."""

        def reached() -> bool:
            if self.process.poll() is not None and not condition():
                raise SystemExit((self.folder / "run.log").read_text(errors="replace")[-6000:])
            return bool(condition())

        common.wait_for(reached, seconds, what)

    def close(self) -> None:
        for process in (self.process, self.server):
            if process.poll() is None:
                process.terminate()
                process.wait(60)


def measure(
    folder: Path, model: Path, steps: int, interval: int, deaths: Deaths, seed: int, options: list[str]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Figures and what happened, death by death."""
    chance = random.Random(seed)
    part = steps / (len(deaths) + 1)
    at = [int(part * (number + 0.5 + chance.random() * 0.5)) for number in range(len(deaths))]
    seen: list[str] = []
    away = []
    run = Run(folder, model, steps, interval, len(deaths), options)
    try:
        for number, ((name, rank), target) in enumerate(zip(deaths, at, strict=True)):
            run.wait(RUN_SECONDS, f"step {target}", lambda target=target: run.step() >= target)
            reached, struck_at = run.step(), time.monotonic()
            common.progress(f"{name} to rank {rank} after step {reached}")
            run.strike(name, rank)
            run.wait(RESTART_SECONDS, "the restart", lambda number=number: len(run.restarts()) > number)
            restart = run.restarts()[-1]
            run.wait(RESTART_SECONDS, "a step after it", lambda back=restart["version"]: run.step() > back)
            away.append(time.monotonic() - struck_at)
            seen.append(
                f"{name} to rank {rank} after step {reached}: {restart['reason']}; on from {restart['version']}, "
                f"{restart['steps_again']} steps again, {restart['batches_kept']} batches kept, {away[-1]:.0f} s"
            )
        code = run.process.wait(RUN_SECONDS)
        rows, restarts = run.rows(), run.restarts()
        served_throughout = run.server.poll() is None
    finally:
        run.close()
    trained = [row["step"] for row in rows if "loss" in row]
    accuracy = {row["step"]: row["eval/pass@1"] for row in rows if "eval/version" in row}
    figures = {
        "exit_code": float(code),
        "steps_missing_or_double": float(sum(abs(trained.count(step) - 1) for step in range(1, steps + 1))),
        "deaths": float(len(restarts)),
        "most_steps_again": float(max(record["steps_again"] for record in restarts)),
        "steps_again_of_sigterm": float(
            sum(record["steps_again"] for record, (name, _) in zip(restarts, deaths, strict=True) if name == "SIGTERM")
        ),
        "batches_kept": float(sum(record["batches_kept"] for record in restarts)),
        "groups_lost": float(sum(record["groups_lost"] for record in restarts)),
        "server_lived": float(served_throughout),
        "longest_away_s": max(away),
        "pass_at_1_before": accuracy[0],
        "pass_at_1_after": accuracy[steps],
        "pass_at_1_gain": accuracy[steps] - accuracy[0],
    }
    return figures, {f"death_{number}": text for number, text in enumerate(seen, start=1)}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the steps at which ranks die")
    parser.add_argument("--model", type=Path, help="debug checkpoint")
    parser.add_argument("--folder", type=Path, help="empty folder for the run and its logs, which are left there")
    arguments = parser.parse_args()
    steps, interval, deaths, options = 500, 20, DEATHS, list[str]()
    if arguments.quick:
        steps, interval, deaths = 16, 4, (("SIGKILL", 1), ("SIGTERM", 1))
        options = ["--training.global_batch_size", "64", "--eval.num_prompts", "8"]
    with tempfile.TemporaryDirectory(prefix="rank_deaths_") as temporary:
        figures, conditions = measure(
            arguments.folder or Path(temporary),
            arguments.model or common.debug_checkpoint(),
            steps,
            interval,
            deaths,
            arguments.seed,
            options,
        )
    conditions |= {"steps": steps, "checkpoint_interval": interval, "seed": arguments.seed, "quick": arguments.quick}
    common.report("rank_deaths", figures, {} if arguments.quick else BARS, conditions, arguments.json)


if __name__ == "__main__":
    main()
