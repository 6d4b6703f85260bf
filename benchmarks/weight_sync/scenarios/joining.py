"""Twenty actors that join a running job by its registry's address and a token, and leave it, at random.

The default task runs twice: with two actors that the run starts, and with none of its own. In the second run, up to
twenty embedded actors, each a process, come and go at random times: most by SIGTERM, upon which they finish what they
have begun, the others by SIGKILL. The run's configuration names none of them.

    joins, leaves, kills     how often an actor came, was asked to go, and was killed
    evictions_of_leavers     actors that were asked to go, and that the registry lost before they had finished
    tokens_unknown           sampled tokens of which it is not known which version has sampled them
    versions_skipped         versions that the trainer did not publish
    stall_p99_ms             of the time per step that the trainer spends on the synchronisation; _more: than without
    pass_at_1_loss           held out, compared with the run without them

A run whose exit code is not 0 ends the benchmark with what the run said last.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import secrets
import subprocess
import sys
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.weight_sync import training_runs
from benchmarks.weight_sync.harness import Option, Run
from tests.journals import deliveries_of
from tests.processes import free_ports
from torchtitan.inference.actor_client import TOKEN_VARIABLE
from torchtitan.utils.json_lines import read_json_lines

# Pauses between one coming or going and the next, in seconds, and the share of goings that are kills.
PAUSES, KILLS = (0.2, 2.0), 0.3
BARS = {
    "evictions_of_leavers": ("<=", 0.0),
    "tokens_unknown": ("<=", 0.0),
    **training_runs.COMPARED_BARS,
}
OPTIONS = {
    "steps": Option(300, quick=20),
    "batch": Option(512, quick=64),
    "actors": Option(20, "that come and go", quick=4),
    "seed": Option(0),
}


def actor(words: list[str], log: str) -> None:
    """In a process of its own: an actor with this command line."""
    from torchtitan.inference.engines.embedded.__main__ import main as serve

    with open(log, "ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.exit(serve(words))


def words_of(port: int) -> list[str]:
    """The command line of an actor that joins the default task at this port, without its name."""
    return [
        "--model", str(common.debug_checkpoint()), "--join", f"127.0.0.1:{port}",
        "--max-length", "32", "--threads", "1", "--cache-mb", "64",
    ]  # fmt: skip


class Fleet:
    """Actors that come and go. words: the command line of each, without its name."""

    def __init__(self, size: int, words: list[str], folder: Path, seed: int):
        # A new process for each, which has imported torch already.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            [
                "torchtitan.inference.engines.embedded.server",
                "torchtitan.inference.serving.joining",
                "torchtitan.models.hf_checkpoint",
            ]
        )
        self._words, self._folder, self._random = words, folder, random.Random(seed)
        self._there: dict[int, tuple[str, BaseProcess]] = {}
        self._going: list[BaseProcess] = []
        self.size, self.counts = size, Counter[str]()
        self.asked: set[str] = set()
        """Names of those that were asked to go"""

    def move(self) -> None:
        """Have one come or go."""
        slot = self._random.randrange(self.size)
        if slot not in self._there:
            name = f"spot-{slot}-{self.counts['joins']}"
            words, log = [*self._words, "--join-as", name], str(self._folder / f"{name}.log")
            process = self._context.Process(target=actor, args=(words, log), daemon=True)
            process.start()
            self._there[slot] = name, process
            self.counts["joins"] += 1
        elif len(self._there) > 2:
            name, process = self._there.pop(slot)
            assert process.pid is not None
            self._going.append(process)
            if self._random.random() < KILLS:
                process.kill()
                self.counts["kills"] += 1
            else:
                process.terminate()
                self.asked.add(name)
                self.counts["leaves"] += 1
        self.counts["most"] = max(self.counts["most"], len(self._there))

    def live(self, run: subprocess.Popen[bytes]) -> None:
        """Until the run has ended."""
        while run.poll() is None:
            self.move()
            time.sleep(self._random.uniform(*PAUSES))

    def end(self) -> None:
        """All of them."""
        for process in [*self._going, *(process for _, process in self._there.values())]:
            process.kill()
            process.join(10.0)


def unknown_tokens(rows: list[dict[str, Any]]) -> int:
    """Sampled tokens of completions.jsonl without a version."""
    unknown = 0
    for row in rows:
        known = sum(part["tokens"] for part in row["versions"] if part["version"] >= 0)
        unknown += row["tokens"] - known
    return unknown


def figures_of(latest: Path) -> dict[str, float]:
    """Of a run."""
    applied = deliveries_of(latest, "applied")
    return {
        **training_runs.figures_of(latest),
        "tokens_unknown": unknown_tokens(read_json_lines(latest / "completions.jsonl")),
        "actors_seen": len({line["actor"] for line in applied}),
    }


def fleet_figures(latest: Path, fleet: Fleet) -> dict[str, float]:
    """How the actors came and went."""
    journal = training_runs.journal(latest)
    lost = Counter(line["actor"] for line in journal if line["event"] == "evicted")
    return {
        **fleet.counts,
        # What the end of the run, which closes its registry first, does to those that go just then is not counted.
        "evictions_of_leavers": sum(lost[name] for name in fleet.asked),
        "left": sum(line["event"] == "left" for line in journal),
    }


def measure(run: Run) -> dict[str, float]:
    options = run.options
    os.environ[TOKEN_VARIABLE] = secrets.token_urlsafe(16)
    settings = training_runs.debug_settings(options.steps, options.batch, run.quick)
    port = free_ports(2)
    joining = {"inference.num_actors": "0", "inference.discover": "true", "weight_sync.port": port}
    common.progress("with actors of its own")
    without = figures_of(training_runs.train_beside(run.folder / "without", settings))
    common.progress("with actors that come and go")
    fleet = Fleet(options.actors, words_of(port), run.folder, options.seed)
    run.closing.callback(fleet.end)
    latest = training_runs.train_beside(run.folder / "with", {**settings, **joining}, fleet.live)
    return training_runs.compared({**figures_of(latest), **fleet_figures(latest, fleet)}, without)
