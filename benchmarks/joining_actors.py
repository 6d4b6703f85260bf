"""Twenty actors that join a running job by its registry's address and a token, and leave it, at random.

The default task runs twice: with two actors that the run starts, and with none of its own. In the second run, up to
twenty embedded actors, each a process, come and go at random times: most by SIGTERM, upon which they finish what they
have begun, the others by SIGKILL. The run's configuration names none of them.

    python benchmarks/joining_actors.py --json [--steps 300] [--actors 20]

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
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from benchmarks import common  # noqa: E402

RUN_SECONDS = 3600.0
# Pauses between one coming or going and the next, in seconds, and the share of goings that are kills.
PAUSES, KILLS = (0.2, 2.0), 0.3
BARS = {
    "evictions_of_leavers": ("<=", 0.0),
    "tokens_unknown": ("<=", 0.0),
    "versions_skipped": ("<=", 0.0),
    "stall_p99_more_ms": ("<=", 5.0),
    "pass_at_1_loss": ("<=", 0.04),
}


def actor(words: list[str], log: str) -> None:
    """In a process of its own: an actor with this command line."""
    from torchtitan.inference.engines.embedded.__main__ import main as serve

    with open(log, "ab") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    sys.exit(serve(words))


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
    return sum(row["tokens"] - sum(one["tokens"] for one in row["versions"] if one["version"] >= 0) for row in rows)


def measure(folder: Path, settings: dict[str, object], fleet: Fleet | None) -> dict[str, float]:
    """Figures of one run in this new folder."""
    from torchtitan.inference.actor_client import TOKEN_VARIABLE
    from torchtitan.report.sync_metrics import FOLDER, JOURNAL_FILE
    from torchtitan.utils.child_process import child_environment
    from torchtitan.utils.json_lines import read_json_lines

    folder.mkdir()
    settings = {**settings, "job.dump_folder": folder}
    words = [str(word) for key, value in settings.items() for word in (f"--{key}", value)]
    with (
        (folder / "run.log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, *common.TRAIN, *words],
            stdout=log,
            stderr=log,
            cwd=REPOSITORY,
            env=child_environment(1, secrets=[TOKEN_VARIABLE]),
        ) as run,
    ):
        try:
            if fleet is not None:
                fleet.live(run)
            code = run.wait(RUN_SECONDS)
        finally:
            run.terminate()
            if fleet is not None:
                fleet.end()
    if code:
        raise SystemExit(f"exit code {code}:\n{(folder / 'run.log').read_text(errors='replace')[-4000:]}")
    latest = folder / "latest"
    rows, journal = read_json_lines(latest / "metrics.jsonl"), read_json_lines(latest / FOLDER / JOURNAL_FILE)
    trained = [row for row in rows if "loss" in row]
    stalls = [1e3 * row["time/sync_stall_s"] for row in trained]
    figures = {
        "steps": len(trained),
        "pass_at_1": next(row["eval/pass@1"] for row in reversed(rows) if "eval/version" in row),
        "versions_skipped": trained[-1]["weight_sync/versions_skipped"],
        "tokens_unknown": unknown_tokens(read_json_lines(latest / "completions.jsonl")),
        "stall_p99_ms": common.percentile(stalls, 0.99),
        "stall_max_ms": max(stalls),
        "step_p50_s": common.percentile([row["time/step_s"] for row in trained], 0.5),
        "actors_seen": len({line["actor"] for line in journal if line["event"] == "applied"}),
    }
    if fleet is not None:
        lost = Counter(line["actor"] for line in journal if line["event"] == "evicted")
        # What the end of the run, which closes its registry first, does to those that go just then is not counted.
        figures |= {**fleet.counts, "evictions_of_leavers": sum(lost[name] for name in fleet.asked)}
        figures["left"] = sum(line["event"] == "left" for line in journal)
    return figures


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--actors", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="debug checkpoint")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.batch, arguments.actors = 20, 64, 4

    from tests.processes import free_ports
    from torchtitan.inference.actor_client import TOKEN_VARIABLE

    os.environ |= {TOKEN_VARIABLE: secrets.token_urlsafe(16), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    model = arguments.model or common.debug_checkpoint()
    settings: dict[str, object] = {
        "job.config_file": REPOSITORY / "train_configs" / "debug_cpu.toml",
        "model.hf_assets_path": model, "training.steps": arguments.steps,
        "training.global_batch_size": arguments.batch, "training.threads": 1, "inference.num_actors": 2,
        "eval.interval": 0, "checkpoint.enable": "false",
    }  # fmt: skip
    if arguments.quick:
        settings["eval.num_prompts"] = 8
    port = free_ports(2)
    words = [
        "--model", str(model), "--join", f"127.0.0.1:{port}",
        "--max-length", "32", "--threads", "1", "--cache-mb", "64",
    ]  # fmt: skip
    joining = {"inference.num_actors": "0", "inference.discover": "true", "weight_sync.port": port}
    with tempfile.TemporaryDirectory(prefix="joining_actors_") as name:
        folder = Path(name)
        common.progress("with actors of its own")
        without = measure(folder / "without", settings, None)
        common.progress("with actors that come and go")
        fleet = Fleet(arguments.actors, words, folder, arguments.seed)
        figures = measure(folder / "with", {**settings, **joining}, fleet)
    figures = {**figures, **{f"{key}_without": one for key, one in without.items()}}
    figures["pass_at_1_loss"] = without["pass_at_1"] - figures["pass_at_1"]
    figures["stall_p99_more_ms"] = figures["stall_p99_ms"] - without["stall_p99_ms"]
    conditions = {name: getattr(arguments, name) for name in ("quick", "steps", "batch", "actors", "seed")}
    conditions |= {"exit codes": "0 and 0", "processor": common.processor(), "load": os.getloadavg()[0]}
    common.report("joining_actors", figures, {} if arguments.quick else BARS, conditions, arguments.json)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    main()
