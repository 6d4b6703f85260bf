"""What a policy learns in the three stages, and that it learns as much as with TRL.

    python benchmarks/learning.py --json --folder outputs/learning

Word problems made from code (word_problems.py), whose worked answers are those of careless people: their arithmetic is
right, and most of them go wrong by a slip. A random Qwen3 of 3.3 million parameters is fine-tuned on them; GRPO goes on
from there with several seeds and learns the careful way. --parts names what is run beside:

    distill    the policy of seed 0 teaches the fine-tuned one in a fifth of the tokens that GRPO trained on
    staleness  runs with the --staleness bounds, and with --uncorrected each once more without off-policy correction
    trl        TRL (benchmarks/peers/setup.sh) from the same checkpoint, with the same prompts, samples and steps, and
               beside each of its seeds a run of ours that drops no group and samples with the present policy, as TRL
    menu       every objective, LoRA and bfloat16, once

With --folder, runs that have ended are taken as they are: the same command goes on where it was stopped.

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
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import word_problems

sys.path.insert(0, str(common.REPOSITORY))

from scripts.compare_runs import blank_figure, dress, write_figure
from torchtitan import train
from torchtitan.config.training_tables import LOSS_TYPES
from torchtitan.models.shape.exports import newest_export
from torchtitan.utils.json_lines import read_json_lines

HERE = Path(__file__).resolve().parent
PEERS_PYTHON = HERE / "peers" / ".venv" / "bin" / "python"
TRL_SECONDS = 3600
# Quantiles of Student's t for an interval of 95 %, by the number of seeds.
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}
# The table of seconds and tokens is for these values of pass@1.
REACHED = (0.5, 0.6, 0.7, 0.8)

PROMPTS, GENERATIONS = 8, 8
TASK: dict[str, Any] = {
    "training.seq_len": 160,
    "training.tokens_per_micro_batch": 4096,
    "rollout.max_completion_tokens": word_problems.LONGEST_ANSWER,
    "rewards.functions": ["accuracy"],
    "eval.samples_per_prompt": 2,
    "eval.greedy": False,
    "inference.num_actors": 1,
    "metrics.loggers": [],
    "metrics.log_freq": 10,
}
SFT: dict[str, Any] = {
    "job.stage": "sft",
    "sft.sample": True,
    "eval.greedy": True,
    "training.global_batch_size": 32,
    "optimizer.lr": 2e-3,
    "lr_scheduler.warmup_steps": 20,
    "lr_scheduler.decay_type": "cosine",
}
GRPO: dict[str, Any] = {
    "training.global_batch_size": PROMPTS * GENERATIONS,
    "optimizer.lr": 1.5e-4,
    "lr_scheduler.warmup_steps": 3,
    "grpo.group_size": GENERATIONS,
    "grpo.num_minibatches": 2,
    "grpo.recompute_old_log_probs": True,
    "rollout.max_staleness": 1,
}
# The steps are many and small, and their gradients are clipped hard: where the student says what its teacher would
# never say, one token has a gradient ten times that of all others. Adapters forget less of the arithmetic meanwhile.
DISTILL: dict[str, Any] = {
    "job.stage": "distill",
    "distill.divergence": "forward_kl",
    "training.global_batch_size": 2,
    "training.max_norm": 0.2,
    "grpo.group_size": 2,
    "grpo.num_minibatches": 1,
    "lora.rank": 8,
    "optimizer.lr": 8e-4,
    "optimizer.beta2": 0.99,
    "lr_scheduler.decay_type": "cosine",
    "lr_scheduler.warmup_steps": 16,
}
UNCORRECTED = {"grpo.off_policy_correction": "none", "grpo.allow_uncorrected": True}
MENU: dict[str, dict[str, Any]] = {
    # Some have no bound for tokens of an older policy, which the configuration refuses of an asynchronous run.
    **{name: {"grpo.loss_type": name, "grpo.allow_uncorrected": True} for name in LOSS_TYPES},
    "lora": {"lora.rank": 16, "optimizer.lr": 2e-3},
    "bfloat16": {"training.mixed_precision_param": "bfloat16", "inference.dtype": "bfloat16"},
}


class Benchmark:
    """Runs of the stages in one folder, one after the other, and what they have shown."""

    def __init__(self, folder: Path, arguments: argparse.Namespace):
        self.folder, self.arguments, self.quick = folder, arguments, arguments.quick
        rows, held_out = (400, 100) if self.quick else (9_000, 400)
        size = word_problems.make_task(folder, rows, held_out, arguments.layers, arguments.hidden)
        self.figures: dict[str, float] = {}
        self.conditions: dict[str, Any] = {"parameters": size}
        self.curves: dict[str, list[Path]] = {}
        self.points: dict[str, list[float]] = {}
        self.common = {
            **TASK,
            "rollout.dataset": folder / "train.jsonl",
            "eval.dataset": folder / "test.jsonl",
            "eval.num_prompts": 4 if self.quick else held_out,
            "training.threads": arguments.threads,
        }
        self.start = ""

    def run(self, name: str, start: str | Path, steps: int, *settings: dict[str, Any], **keys: Any) -> Path:
        """The folder of one run from a checkpoint; keys: of tables, with __ for the dot."""
        values = {
            **self.common,
            "job.name": name,
            "job.dump_folder": self.folder / "runs" / name,
            "model.hf_assets_path": start,
            "training.steps": steps,
            "eval.interval": 0 if self.quick else max(1, steps // 3),
            **{key: value for table in settings for key, value in table.items()},
            **{key.replace("__", "."): value for key, value in keys.items()},
        }
        latest = self.folder / "runs" / name / "latest"

        def work() -> str:
            done = train({}, values)
            scores = passed(latest)
            return f"{done.version} steps, " + (
                f"pass@1 {scores[0]:.3f} → {scores[-1]:.3f}" if scores else "not sampled"
            )

        common.once(self.folder / "runs" / f"{name}.json", values, work)
        return latest.resolve()

    def fine_tune(self) -> None:
        """From random weights to a policy that answers as careless people do."""
        # No actor works while it trains.
        keys: dict[str, Any] = {"training__threads": os.cpu_count()} | ({"sft__sample": False} if self.quick else {})
        tuned = self.run("sft", self.folder / "random", 3 if self.quick else self.arguments.sft_steps, SFT, **keys)
        self.start = newest_export(str(tuned))
        self.figures["sft_loss"] = values_of(tuned, "eval/loss")[-1]
        if not self.quick:
            self.figures["greedy_before"] = values_of(tuned, "eval/greedy")[-1]

    def grpo(self, name: str, seed: int, *settings: dict[str, Any], steps: int = 0) -> Path:
        few = {"training.global_batch_size": 16, "rollout.max_completion_tokens": 16} if self.quick else {}
        return self.run(name, self.start, steps or self.arguments.steps, GRPO, few, *settings, training__seed=seed)

    def seeds(self) -> None:
        runs = [self.grpo(f"grpo-{seed}", seed) for seed in range(self.arguments.seeds)]
        self.curves["GRPO"] = runs
        scores = [passed(run) for run in runs]
        gains, after = [curve[-1] - curve[0] for curve in scores], [curve[-1] for curve in scores]
        before = [curve[0] for curve in scores]
        for name, values in (("grpo_gain", gains), ("pass_before", before), ("pass_after", after)):
            self.figures[name] = statistics.fmean(values)
        self.conditions |= {"gain": interval(gains), "tokens trained": trained_tokens(runs[0])}
        self.conditions |= {f"way of seed {seed}": way(run) for seed, run in enumerate(runs)}
        self.conditions |= {f"pass@1 of {bar}": reached(runs, bar) for bar in REACHED}

    def distill(self) -> None:
        """In 0.19 of GRPO's samples: they are soon careful, and longer. Seed 0 is the teacher."""
        teacher = self.curves["GRPO"][0]
        samples = int(self.arguments.steps * PROMPTS * GENERATIONS * 0.19)
        steps = samples // DISTILL["training.global_batch_size"]
        keys = {"distill__teacher": newest_export(str(teacher))}
        student = self.run("distill", self.start, steps, GRPO, DISTILL, **keys)
        self.curves["distillation"] = [student]
        self.figures["distill_share"] = passed(student)[-1] / passed(teacher)[-1]
        self.figures["distill_tokens_share"] = trained_tokens(student) / trained_tokens(teacher)
        self.conditions["way of the student"] = way(student)

    def staleness(self) -> None:
        ways = {"": {}, " uncorrected": UNCORRECTED} if self.arguments.uncorrected else {"": {}}
        ends: dict[str, float] = {}
        for bound, (suffix, keys) in itertools.product(self.arguments.staleness, ways.items()):
            name = f"staleness {bound}{suffix}"
            run = self.grpo(name.replace(" ", "-"), 0, {"rollout.max_staleness": bound, "eval.interval": 0}, keys)
            lags = values_of(run, "staleness/mean")
            # The first batches are of the first version: the lag grows until the bound is reached.
            settled = lags[bound + 1 :] or lags
            ends[name] = passed(run)[-1]
            self.conditions[name] = f"pass@1 {way(run)}; mean staleness {statistics.fmean(settled):.2f} once settled"
        if {"staleness 0", "staleness 4"} <= ends.keys():
            self.figures["staleness_4_loss"] = ends["staleness 0"] - ends["staleness 4"]
        self.points |= {name: [end] for name, end in ends.items()}

    def trl(self) -> None:
        """A seed of ours and one of TRL's in turn, so that what is there when it is stopped are pairs."""
        ours: list[Path] = []
        trl_scores: list[float] = []
        rewards: list[float] = []
        for seed in range(self.arguments.seeds):
            # TRL samples no other groups in the place of those whose rewards are equal, and with the present policy.
            keys = {"grpo.drop_zero_variance": False, "rollout.max_staleness": 0, "eval.interval": 0}
            alike = self.grpo(f"alike-{seed}", seed, keys)
            ours.append(alike)
            trl_scores.append(self.train_with_trl(seed))
            of_steps = statistics.fmean(json.loads((self.folder / f"trl-{seed}-rewards.json").read_text()))
            rewards.append(statistics.fmean(values_of(alike, "reward/mean")) - of_steps)
        self.curves["no group dropped"], self.points["TRL"] = ours, trl_scores
        scores = [passed(run)[-1] for run in ours]
        self.figures["difference_to_trl"] = statistics.fmean(scores) - statistics.fmean(trl_scores)
        pairs = [score - other for score, other in zip(scores, trl_scores, strict=True)]
        self.conditions |= {"ours": interval(scores), "TRL": interval(trl_scores), "difference": interval(pairs)}
        self.conditions["difference of the mean training reward"] = interval(rewards)

    def train_with_trl(self, seed: int) -> float:
        """pass@1 of what TRL makes of the same checkpoint, as our evaluation has it."""
        output = self.folder / f"trl-{seed}"
        options = {
            "model": self.start,
            "rows": str(self.folder / "train.jsonl"),
            "output": str(output),
            "seed": seed,
            "steps": self.arguments.steps,
            "prompts": PROMPTS,
            "generations": GENERATIONS,
            "minibatches": GRPO["grpo.num_minibatches"],
            "new_tokens": word_problems.LONGEST_ANSWER,
            "learning_rate": GRPO["optimizer.lr"],
            "warmup": GRPO["lr_scheduler.warmup_steps"],
        }
        command = [PEERS_PYTHON, HERE / "peers" / "trl_learning.py", json.dumps(options)]

        def work() -> str:
            common.run(command, TRL_SECONDS, HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
            return f"{options['steps']} steps"

        common.once(self.folder / "runs" / f"trl-{seed}.json", options, work)
        # The evaluation before the first step is enough for it.
        scored = self.run(f"trl-{seed}-scored", output, 1, SFT, eval__stop_at=1e-9, eval__greedy=False)
        return passed(scored)[0]

    def menu(self) -> None:
        """All with half of the steps, from the same prompts."""
        for name, keys in MENU.items():
            run = self.grpo(f"menu-{name}", 0, keys, steps=max(2, self.arguments.steps // 2))
            self.conditions[f"menu: {name}"] = way(run)

    def draw(self, file: Path) -> None:
        """pass@1 over steps and tokens, means with an interval of 95 % over the seeds, and over the bound of
        staleness."""
        figure = blank_figure(width=10.5, height=3.4)
        by_step, by_tokens, by_bound = figure.subplots(1, 3, sharey=True)
        for number, (name, runs) in enumerate(self.curves.items()):
            evaluations = [list(zip(*seeds, strict=True)) for seeds in zip(*map(points, runs), strict=True)]
            mean = [statistics.fmean(scores) for *_, scores in evaluations]
            half = [half_interval(scores) for *_, scores in evaluations]
            steps, tokens = ([statistics.fmean(evaluation[place]) for evaluation in evaluations] for place in (0, 2))
            line = "-" if len(mean) > 2 else ""  # between the start and the end nothing was measured
            look = {"marker": "o", "markersize": 3, "capsize": 2, "ls": line, "color": f"C{number}", "label": name}
            by_tokens.errorbar([count / 1000 for count in tokens], mean, half, **look)
            if name != "distillation":  # whose steps are smaller
                by_step.errorbar(steps, mean, half, **look)
        dress(by_step, "Held-out pass@1", "step")
        dress(by_tokens, "Held-out pass@1", "thousand tokens trained")
        if trl_scores := self.points.get("TRL"):
            by_step.errorbar(
                [1.03 * self.arguments.steps], statistics.fmean(trl_scores), half_interval(trl_scores),
                marker="s", markersize=4, capsize=2, ls="", color="C7", label="TRL",
            )  # fmt: skip
        for suffix, label in (("", "truncated weights"), (" uncorrected", "no correction")):
            bounds = [bound for bound in self.arguments.staleness if f"staleness {bound}{suffix}" in self.points]
            ends = [self.points[f"staleness {bound}{suffix}"][0] for bound in bounds]
            if bounds:
                by_bound.plot(bounds, ends, marker="o", markersize=4, label=label)
        by_bound.set_ylim(0, 1)
        dress(by_bound, "pass@1 in the end, one seed", "bound of staleness")
        for axes in (by_step, by_tokens, by_bound):
            if axes.get_legend_handles_labels()[0]:
                axes.legend(frameon=False, fontsize=8)
        write_figure(figure, file, "--figure")


def passed(folder: Path) -> list[float]:
    """pass@1 of all evaluations of a run."""
    return [score for *_, score in points(folder)]


def points(folder: Path) -> list[tuple[int, float, float, float]]:
    """Step, seconds in steps, tokens of trained samples with their prompts, and pass@1, of all evaluations."""
    rows = read_json_lines(folder / "metrics.jsonl")
    seconds = itertools.accumulate(row.get("time/step_s") or 0.0 for row in rows)
    tokens = itertools.accumulate((row.get("tokens_per_s") or 0.0) * (row.get("time/step_s") or 0.0) for row in rows)
    return [
        (row["step"], now, count, row["eval/pass@1"])
        for row, now, count in zip(rows, seconds, tokens, strict=True)
        if row.get("eval/pass@1") is not None
    ]


def values_of(folder: Path, key: str) -> list[float]:
    """All values of a metric."""
    return [row[key] for row in read_json_lines(folder / "metrics.jsonl") if row.get(key) is not None]


def trained_tokens(folder: Path) -> float:
    return points(folder)[-1][2]


def way(folder: Path) -> str:
    """Seconds in steps and tokens trained until each evaluation, with its pass@1."""
    return "; ".join(
        f"{score:.3f} after {now:.0f} s and {count:,.0f} tokens" for _, now, count, score in points(folder)
    )


def reached(runs: list[Path], bar: float) -> str:
    """Mean seconds and tokens until the first evaluation with this pass@1."""
    first = [next((point for point in points(run) if point[3] >= bar), None) for run in runs]
    arrivals = [point for point in first if point]
    if not arrivals:
        return "not reached"
    seconds, tokens = (statistics.fmean(point[place] for point in arrivals) for place in (1, 2))
    return f"{seconds:.0f} s, {tokens:,.0f} tokens ({len(arrivals)} of {len(runs)} seeds)"


def half_interval(values: Sequence[float]) -> float:
    """Half of the interval of 95 % around the mean; 0 for one value."""
    if len(values) < 2:
        return 0.0
    return STUDENT.get(len(values), 2.0) * statistics.stdev(values) / math.sqrt(len(values))


def interval(values: list[float]) -> str:
    """Mean with an interval of 95 %, which one value has not."""
    mean = f"{statistics.fmean(values):.3f}"
    return f"{mean} ± {half_interval(values):.3f} ({len(values)} seeds)" if len(values) > 1 else f"{mean} (one seed)"


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sft-steps", type=int, default=700)
    parser.add_argument("--steps", type=int, default=30, help="of GRPO")
    parser.add_argument("--staleness", type=lambda text: [int(bound) for bound in text.split(",")], default=[0, 4])
    parser.add_argument("--uncorrected", action="store_true", help="also without off-policy correction")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--threads", type=int, default=0, help="of the trainer; 0 takes what the actor leaves")
    parser.add_argument("--parts", default="distill,staleness,trl", help="beside GRPO, in this order; '' for nothing")
    parser.add_argument("--folder", type=Path, help="where runs are kept; those that have ended are taken")
    parser.add_argument("--figure", type=Path, help="a picture of the runs (.svg or .png)")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.steps, arguments.parts = 1, 2, ""
        arguments.layers, arguments.hidden = 2, 64
    parts = list(filter(None, arguments.parts.split(",")))
    if unknown := set(parts) - {"distill", "staleness", "trl", "menu"}:
        parser.error(f"--parts has no {', '.join(sorted(unknown))}")
    if "trl" in parts and not PEERS_PYTHON.exists():
        common.progress("TRL is not installed (benchmarks/peers/setup.sh): difference_to_trl is left out")
        parts.remove("trl")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        benchmark = Benchmark(folder, arguments)
        for part in ("fine_tune", "seeds", *parts):
            getattr(benchmark, part)()
        if arguments.figure:
            benchmark.draw(arguments.figure)
    bars = {
        "greedy_before": ("<=", 0.40),
        "grpo_gain": (">=", 0.30),
        "difference_to_trl": (">=", -0.02),
        "staleness_4_loss": ("<=", 0.03),
        "distill_share": (">=", 0.95),
        "distill_tokens_share": ("<=", 0.20),
    }
    conditions = {"steps": arguments.steps, "processor": common.processor(), "quick": arguments.quick}
    common.report("learning", benchmark.figures, bars, benchmark.conditions | conditions, arguments.json)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
