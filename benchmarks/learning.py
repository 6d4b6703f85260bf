"""What a policy learns in the three stages, and that it learns as much as with TRL.

    python benchmarks/learning.py --json

Word problems made from code (word_problems.py). A random Qwen3 of 3.3 million parameters is fine-tuned until it solves
a fifth of the held-out problems; GRPO goes on from there with several seeds, once with staleness 0 and once with
staleness 4; the best of the seeds teaches the fine-tuned policy in a fifth of the steps. Where
benchmarks/peers/setup.sh has installed TRL it trains from the same checkpoint with the same prompts, samples and steps,
beside runs of ours that drop no group, as it does not.

    grpo_gain          pass@1 after minus before, mean over the seeds
    difference_to_trl  mean pass@1 of ours without dropped groups, minus TRL's
    staleness_4_loss   pass@1 with staleness 0 minus with staleness 4
    distill_share      of the teacher's pass@1
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import word_problems

from torchtitan import train
from torchtitan.grpo_train import Run
from torchtitan.models.shape import newest_export
from torchtitan.report.plots import compare_runs
from torchtitan.utils.json_lines import read_json_lines

HERE = Path(__file__).resolve().parent
PEERS_PYTHON = HERE / "peers" / ".venv" / "bin" / "python"
TRL_SECONDS = 3600
# Quantiles of Student's t for an interval of 95 %, by the number of seeds.
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}

PROMPTS, GENERATIONS = 16, 8
TASK: dict[str, Any] = {
    "training.seq_len": 160,
    "training.tokens_per_micro_batch": 4096,
    "rollout.max_completion_tokens": word_problems.LONGEST_ANSWER,
    "rewards.functions": ["accuracy"],
    "eval.samples_per_prompt": 2,
    "eval.pass_at_k": [1, 2],
    "eval.greedy": False,
    "inference.num_actors": 1,
    "metrics.enable_tensorboard": False,
    "metrics.log_freq": 10,
}
SFT: dict[str, Any] = {
    "job.stage": "sft",
    "sft.sample": True,
    "training.global_batch_size": 32,
    "optimizer.lr": 2e-3,
    "lr_scheduler.warmup_steps": 20,
}
GRPO: dict[str, Any] = {
    "training.global_batch_size": PROMPTS * GENERATIONS,
    "optimizer.lr": 2e-4,
    "lr_scheduler.warmup_steps": 3,
    "grpo.group_size": GENERATIONS,
    "grpo.num_minibatches": 2,
    "grpo.recompute_old_log_probs": True,
    "rollout.max_staleness": 1,
}


class Benchmark:
    """Runs of the stages in one folder, one after the other."""

    def __init__(self, folder: Path, arguments: argparse.Namespace):
        self.folder, self.steps, self.quick, self.start = folder, arguments.steps, arguments.quick, arguments.start
        self.shape = (arguments.layers, arguments.hidden)
        self.common = {
            **TASK,
            "rollout.dataset": folder / "train.jsonl",
            "eval.dataset": folder / "test.jsonl",
            "eval.num_prompts": 4 if self.quick else 200,
            "training.threads": arguments.threads,
        }

    def run(self, name: str, start: str | Path, steps: int, *settings: dict[str, Any], **keys: Any) -> Run:
        """One run from a checkpoint; keys: of tables, with __ for the dot."""
        own = {key.replace("__", "."): value for key, value in keys.items()}
        values = {
            **self.common,
            "job.name": name,
            "job.dump_folder": self.folder / "runs" / name,
            "model.hf_assets_path": start,
            "training.steps": steps,
            "eval.interval": 0 if self.quick else max(1, steps // 5),
            **{key: value for table in settings for key, value in table.items()},
            **own,
        }
        begun = time.perf_counter()
        done = train({}, values)
        if done.exit_code:
            sys.exit(f"{name} was interrupted after {done.version} steps; its folder is {done.folder}")
        scores = passed(done.folder)
        shown = f"pass@1 {scores[0]:.3f} → {scores[-1]:.3f}" if scores else "not sampled"
        common.progress(f"{name}: {done.version} steps, {shown}, {time.perf_counter() - begun:.0f} s")
        return done

    def fine_tune(self) -> Run:
        """From random weights to a policy that solves some of the problems."""
        if self.quick:
            return self.run("sft", self.folder / "random", 3, SFT, sft__sample=False)
        return self.run("sft", self.folder / "random", 3000, SFT, eval__interval=25, eval__stop_at=self.start)

    def grpo(self, name: str, start: str, seed: int, **keys: Any) -> Run:
        few = {"training.global_batch_size": 16, "rollout.max_completion_tokens": 16} if self.quick else {}
        return self.run(name, start, self.steps, GRPO, few, training__seed=seed, **keys)

    def distill(self, start: str, teacher: str) -> Run:
        """In a fifth of GRPO's steps, whose tokens are as many."""
        keys = {"job.stage": "distill", "distill.teacher": teacher, "optimizer.lr": 5e-4}
        return self.run("distill", start, max(2, self.steps // 5), GRPO, keys)

    def trl(self, start: str, seed: int) -> float:
        """pass@1 of what TRL makes of the same checkpoint, as our evaluation has it."""
        output = self.folder / f"trl-{seed}"
        options = {
            "model": start,
            "rows": str(self.folder / "train.jsonl"),
            "output": str(output),
            "seed": seed,
            "steps": self.steps,
            "prompts": PROMPTS,
            "generations": GENERATIONS,
            "minibatches": GRPO["grpo.num_minibatches"],
            "new_tokens": word_problems.LONGEST_ANSWER,
            "learning_rate": GRPO["optimizer.lr"],
            "warmup": GRPO["lr_scheduler.warmup_steps"],
        }
        command = [PEERS_PYTHON, HERE / "peers" / "trl_learning.py", json.dumps(options)]
        common.run(command, TRL_SECONDS, HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
        # The evaluation before the first step is enough for it.
        scored = self.run(f"trl-{seed}-scored", output, 1, SFT, eval__stop_at=1e-9)
        return passed(scored.folder)[0]


def passed(folder: Path) -> list[float]:
    """pass@1 of all evaluations of a run."""
    rows = read_json_lines(folder / "metrics.jsonl")
    return [row["eval/pass@1"] for row in rows if row.get("eval/pass@1") is not None]


def interval(values: list[float]) -> str:
    """Mean with an interval of 95 %."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:.3f} (one seed)"
    half = STUDENT.get(len(values), 2.0) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.3f} ± {half:.3f} ({len(values)} seeds)"


def way(folder: Path) -> str:
    """Seconds in steps and tokens trained until each evaluation, with its pass@1."""
    rows = read_json_lines(folder / "metrics.jsonl")
    seconds = itertools.accumulate(row.get("time/step_s") or 0.0 for row in rows)
    tokens = itertools.accumulate((row.get("tokens_per_s") or 0) * (row.get("time/step_s") or 0) for row in rows)
    points = [
        f"{row['eval/pass@1']:.3f} after {now:.0f} s and {count:,.0f} tokens"
        for row, now, count in zip(rows, seconds, tokens, strict=True)
        if row.get("eval/pass@1") is not None
    ]
    return "; ".join(points)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="of GRPO")
    parser.add_argument("--start", type=float, default=0.2, help="pass@1 at which fine-tuning ends")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--threads", type=int, default=0, help="of the trainer; 0 takes what the actor leaves")
    parser.add_argument("--parts", default="trl,staleness,distill", help="what is run beside GRPO; '' for nothing")
    parser.add_argument("--folder", type=Path, help="where runs are kept; a fine-tuned policy that is there is taken")
    parser.add_argument("--figure", type=Path, help="a picture of the runs (.svg or .png)")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.steps, arguments.parts = 1, 2, ""
        arguments.layers, arguments.hidden = 2, 64
    parts = set(filter(None, arguments.parts.split(",")))
    if "trl" in parts and not PEERS_PYTHON.exists():
        common.progress("TRL is not installed (benchmarks/peers/setup.sh): difference_to_trl is left out")
        parts.discard("trl")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        figures, conditions, runs = measure(Benchmark(folder, arguments), arguments.seeds, parts)
        if arguments.figure:
            compare_runs([run.folder for run in runs.values()], arguments.figure, list(runs))
    bars = {
        "grpo_gain": (">=", 0.30),
        "difference_to_trl": (">=", -0.02),
        "staleness_4_loss": ("<=", 0.03),
        "distill_share": (">=", 0.95),
    }
    conditions |= {"steps": arguments.steps, "processor": common.processor(), "quick": arguments.quick}
    common.report("learning", figures, bars, conditions, arguments.json)


def measure(
    benchmark: Benchmark, seeds: int, parts: set[str]
) -> tuple[dict[str, float], dict[str, Any], dict[str, Run]]:
    """The figures, under which conditions, and the runs by what a picture calls them."""
    rows, held_out = (400, 100) if benchmark.quick else (20_000, 400)
    size = word_problems.make_task(benchmark.folder, rows, held_out, *benchmark.shape)
    figures: dict[str, float] = {}
    found = newest_export(str(benchmark.folder / "runs" / "sft" / "latest"))
    if not (Path(found) / "config.json").is_file():
        tuned = benchmark.fine_tune()
        found, figures["sft_loss"] = newest_export(str(tuned.folder)), tuned.metrics["eval/loss"]
    runs = {f"GRPO, seed {seed}": benchmark.grpo(f"grpo-{seed}", found, seed) for seed in range(seeds)}
    scores = [passed(run.folder) for run in runs.values()]
    gains, after = [one[-1] - one[0] for one in scores], [one[-1] for one in scores]
    before = [one[0] for one in scores]
    for name, values in (("grpo_gain", gains), ("pass_before", before), ("pass_after", after)):
        figures[name] = statistics.fmean(values)
    conditions: dict[str, Any] = {
        "parameters": size,
        "gain": interval(gains),
        "way of seed 0": way(next(iter(runs.values())).folder),
    }
    if "trl" in parts:
        # TRL samples no other groups in the place of those whose rewards are equal.
        alike = [benchmark.grpo(f"alike-{seed}", found, seed, grpo__drop_zero_variance=False) for seed in range(seeds)]
        ours, theirs = [passed(run.folder)[-1] for run in alike], [benchmark.trl(found, seed) for seed in range(seeds)]
        figures["difference_to_trl"] = statistics.fmean(ours) - statistics.fmean(theirs)
        conditions |= {"ours": interval(ours), "TRL": interval(theirs)}
    if "staleness" in parts:
        for staleness in (0, 4):
            keys = {"rollout__max_staleness": staleness}
            runs[f"staleness {staleness}"] = benchmark.grpo(f"staleness-{staleness}", found, 0, **keys)
        fresh, stale = (passed(runs[f"staleness {staleness}"].folder)[-1] for staleness in (0, 4))
        figures["staleness_4_loss"] = fresh - stale
    if "distill" in parts:
        best = max(range(seeds), key=after.__getitem__)
        teacher = newest_export(str(runs[f"GRPO, seed {best}"].folder))
        runs["distillation"] = benchmark.distill(found, teacher)
        figures["distill_share"] = passed(runs["distillation"].folder)[-1] / max(after[best], 1e-9)
    return figures, conditions, runs


if __name__ == "__main__":
    main()
    sys.stdout.flush()
