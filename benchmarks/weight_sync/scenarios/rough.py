"""Whole runs of the default task whose processes are killed and stopped at random; nobody helps but their launcher.

Ranks under the launcher, and three embedded actors. At random times a process of a kind of --kinds gets SIGKILL, or is
stopped for a moment or for longer than its deadlines. With `--transport s3`, versions go through moto's server as the
object store, which is stopped for moments, too (needs the extra `remote` and moto[server]). With --actors, so many
actors come and go instead (joining.py).

    steps_missing          that are not in metrics.jsonl
    tokens_unknown         sampled tokens of which it is not known which version has sampled them
    actors_torn            how often an actor's weights were not those of the version that it named
    processes_left         that the run has started and that outlive it
    longest_away_s         between two steps
    stall_p50_ms, …        of the time per step that the trainer spends on the synchronisation

A run whose exit code is not 0 ends the benchmark with what the run said last.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from benchmarks import common
from benchmarks.weight_sync import training_runs
from benchmarks.weight_sync.harness import Option, Run
from benchmarks.weight_sync.scenarios import chaos, joining
from tests.processes import free_ports
from torchtitan.inference.actor_client import TOKEN_VARIABLE
from torchtitan.utils.json_lines import read_json_lines

# Kind -> what the command line of such a process holds.
KINDS = {
    "actor": ("torchtitan.inference.engines.embedded",),
    "registry": ("weight_sync.main", '"part": "registry"'),
    "shard server": ("weight_sync.main", '"part": "shard server"'),
    "rank": ("torchtitan.grpo_train",),
    "store": ("moto.server",),
}
# A process that dies more often than that in a row ends a run by intention (servers.MAX_RESTARTS).
PAUSE_SECONDS, STOP_SECONDS = (4.0, 20.0), (0.1, 12.0)
RANKS, RESTARTS = 2, 100

BARS = {
    "steps_missing": ("<=", 0.0),
    "tokens_unknown": ("<=", 0.0),
    "actors_torn": ("<=", 0.0),
    "processes_left": ("<=", 0.0),
}
OPTIONS = {
    "steps": Option(200, quick=12),
    "seed": Option(0),
    "kinds": Option("actor,registry,shard server,rank"),
    "transport": Option("tcp", "tcp or s3"),
    "actors": Option(0, "that come and go; 0: the run has three of its own"),
}


class Faults:
    """Strikes a run until its last steps."""

    def __init__(self, folder: Path, options: Any, fleet: joining.Fleet | None):
        self._metrics, self._options, self._fleet = folder / "latest" / "metrics.jsonl", options, fleet
        self._random = random.Random(options.seed)
        self.counts: Counter[str] = Counter()
        self.started: dict[int, psutil.Process] = {}
        """All processes of the run that were ever seen"""
        self.longest_away = 0.0

    def live(self, run: subprocess.Popen[bytes]) -> None:
        """See training_runs.train_beside."""
        last_step, struck_at, moved_at, due = 0, 2, time.monotonic(), 0.0
        while run.poll() is None:
            for process in psutil.Process(run.pid).children(recursive=True):
                self.started.setdefault(process.pid, process)
            rows = read_json_lines(self._metrics) if self._metrics.exists() else []
            step = max((row["step"] for row in rows), default=0)
            if step > last_step:
                away, moved_at, last_step = time.monotonic() - moved_at, time.monotonic(), step
                self.longest_away = max(self.longest_away, away if last_step > 1 else 0.0)
            # Where the last fault is still being put right, another one would only take longer.
            if struck_at < step < self._options.steps - 2 and time.monotonic() > due:
                struck_at, due = step, time.monotonic() + self._random.uniform(*PAUSE_SECONDS)
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._strike(run)
                if self._fleet is not None:
                    self._fleet.move()
            time.sleep(0.3)

    def _strike(self, run: subprocess.Popen[bytes]) -> None:
        kind = self._random.choice(self._options.kinds.split(","))
        # Actors that come and go are not of the run, and are killed by who has them come.
        of_run = psutil.Process(None if kind == "store" else run.pid).children(recursive=True)
        found = [process for process in of_run if _is_of(process, KINDS[kind])]
        if not found:
            return
        process = self._random.choice(found)
        if kind != "store" and self._random.random() < 0.5:
            process.kill()
            self.counts[f"kill {kind}"] += 1
            return
        process.send_signal(signal.SIGSTOP)
        time.sleep(self._random.uniform(*STOP_SECONDS) / (4 if kind == "store" else 1))
        process.send_signal(signal.SIGCONT)
        self.counts[f"stop {kind}"] += 1

    def left(self) -> list[psutil.Process]:
        """Processes that outlive the run."""
        return [
            process
            for process in self.started.values()
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        ]


def _is_of(process: psutil.Process, words: tuple[str, ...]) -> bool:
    try:
        line = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return all(word in line for word in words) and "torchtitan.utils.launch" not in line


def figures_of(latest: Path, steps: int) -> dict[str, float]:
    """Of the run that has ended."""
    rows = [row for row in read_json_lines(latest / "metrics.jsonl") if "loss" in row]
    stalls = [1e3 * row["time/sync_stall_s"] for row in rows]
    events, journal = read_json_lines(latest / "events.jsonl"), training_runs.journal(latest)
    distrusted = sum(row["kind"] == "actor_evicted" and row["noticed_by"] == "parity" for row in events)
    completions = read_json_lines(latest / "completions.jsonl")
    return {
        "steps_missing": float(steps - len({row["step"] for row in rows})),
        "tokens": float(sum(row["tokens"] for row in completions)),
        "tokens_unknown": float(joining.unknown_tokens(completions)),
        "actors_torn": float(distrusted + sum(line["event"] == "poisoned" for line in journal)),
        "versions_published": float(len({line["version"] for line in journal if line["event"] == "publish"})),
        "versions_skipped": rows[-1]["weight_sync/versions_skipped"],
        "stall_p50_ms": common.percentile(stalls, 0.5),
        "stall_p99_ms": common.percentile(stalls, 0.99),
        "stall_max_ms": max(stalls),
        "step_p50_s": common.percentile([row["time/step_s"] for row in rows], 0.5),
    }


def measure(run: Run) -> dict[str, float]:
    options, folder = run.options, run.folder / "run"
    os.environ[TOKEN_VARIABLE] = secrets.token_urlsafe(16)
    settings = {
        **training_runs.debug_settings(options.steps, 64, run.quick),
        "inference.num_actors": 3, "checkpoint.enable": "true", "checkpoint.interval": 20,
        "comm.train_timeout_seconds": 20,
    }  # fmt: skip
    fleet = None
    if options.transport == "s3":
        run.closing.enter_context(chaos.s3_store())
        settings |= {"weight_sync.transport": "disk", "weight_sync.disk.path": f"s3://{chaos.BUCKET}/weights"}
    if options.actors:
        port = free_ports(1 + RANKS)
        settings |= {"inference.num_actors": 0, "inference.discover": "true", "weight_sync.port": port}
        fleet = joining.Fleet(options.actors, joining.words_of(port), run.folder, options.seed)
        run.closing.callback(fleet.end)
        for _ in range(options.actors):
            fleet.move()
    faults = Faults(folder, options, fleet)
    words = ("--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", str(RESTARTS))
    launcher = ("-m", "torchtitan.utils.launch", *words)
    latest = training_runs.train_beside(folder, settings, faults.live, launcher)
    time.sleep(5.0)
    left = faults.left()
    return {
        **figures_of(latest, options.steps),
        "processes_left": float(len(left)),
        "longest_away_s": faults.longest_away,
        **({} if fleet is None else {name: float(count) for name, count in fleet.counts.items()}),
        **{name: float(count) for name, count in sorted(faults.counts.items())},
    }
