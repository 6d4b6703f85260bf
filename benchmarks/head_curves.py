"""The default run with each way of the log-prob head: live, and on the same recorded rollouts.

    python benchmarks/head_curves.py --json --output docs/images/head_reward_curves.png

The live run with one_pass is the record. On its batches, every step begins with the weights and the optimizer state of
that run, and is made with each head: there the losses have to agree. Left to themselves, two replays that differ by
rounding drift apart, as soon as the first completion crosses a mask's bound on one side only; a replay with one_pass
whose first weights are changed in the last bit shows how fast. Live runs sample for themselves, so that their curves
only have to reach the same level. --folder keeps the runs, and takes up those that are there already.
"""

from __future__ import annotations

import copy
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
import torch

sys.path.insert(0, str(common.REPOSITORY))

from torchtitan.config.job_config import JobConfig
from torchtitan.distributed.placement import ParallelDims
from torchtitan.preflight.validate import load_config
from torchtitan.report.metrics import METRICS_FILE
from torchtitan.report.plots import blank_figure, dress, save_figure
from torchtitan.rollout.flow.journal import ReplaySource
from torchtitan.trainer.policy_trainer import PolicyTrainer
from torchtitan.utils.json_lines import read_json_lines

HEADS = {"one_pass": "#2463b4", "two_pass": "#d9622b", "full": "#2e8b57"}
RECORDED = "one_pass"
LAST_BIT = "one_pass, last bit changed"
# Rewards of single steps scatter by about 0.02; the level is the mean over the last ones.
LEVEL_STEPS = 20
BAR = 1e-5

Rows = list[dict[str, Any]]


def live_run(folder: Path, head: str, steps: int) -> Rows:
    """Rows of the run's steps and evaluations; a run that is whole already is not repeated."""
    metrics = folder / head / "latest" / METRICS_FILE
    if not metrics.is_file() or len(column(read_json_lines(metrics), "loss")) < steps:
        common.progress(f"live, {head}: {steps} steps")
        settings = {
            "job.config_file": common.REPOSITORY / "train_configs" / "debug_cpu.toml",
            "job.dump_folder": folder / head,
            "model.hf_assets_path": common.debug_checkpoint(),
            "model.logprob_head": head,
            "training.steps": steps,
            "training.threads": 1,
            "eval.interval": steps,
            "checkpoint.enable": "false",
        }
        common.train(settings)
    return read_json_lines(metrics)


def column(rows: Rows, key: str) -> list[float]:
    """Of the rows that have it."""
    return [row[key] for row in rows if key in row]


class Replica(PolicyTrainer):
    """A trainer in this process, with one way of the head."""

    def __init__(self, config: JobConfig, head: str):
        config = copy.deepcopy(config)
        config.model.logprob_head = head
        super().__init__(config, ParallelDims(1, 1, 1, world_size=1))

    def follow(self, other: Replica) -> None:
        """Go on with the other's weights and optimizer state."""
        self.policy.load_state_dict(other.policy.state_dict())
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))

    def loss(self, source: ReplaySource, version: int) -> float:
        """Of the recorded batch, while the replica trains on it."""
        result = self.train_batch(source.next_batch(version))
        loss = result.metrics["loss"]
        assert loss is not None
        return loss


def replay(run: Path, steps: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Losses of the recorded batches: (with every step from the same weights, left to themselves)."""
    torch.set_num_threads(1)
    config = load_config(["--job.config_file", str(run / "config.toml")])
    source = ReplaySource(run)
    same = {head: Replica(config, head) for head in HEADS}
    free = {"full": Replica(config, "full"), LAST_BIT: Replica(config, RECORDED)}
    with torch.no_grad():
        free[LAST_BIT].policy.model.norm.weight.mul_(1 + torch.finfo(torch.float32).eps)
    stepwise: dict[str, list[float]] = {name: [] for name in same}
    alone: dict[str, list[float]] = {name: [] for name in free}
    for version in range(steps):
        if version % 20 == 0:
            common.progress(f"replay: step {version} of {steps}")
        for head in HEADS:
            if head != RECORDED:
                same[head].follow(same[RECORDED])
                stepwise[head].append(same[head].loss(source, version))
        stepwise[RECORDED].append(same[RECORDED].loss(source, version))
        for name, replica in free.items():
            alone[name].append(replica.loss(source, version))
    return stepwise, alone


def apart(some: list[float], others: list[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(some, others, strict=True)]


def steps_within(differences: list[float]) -> int:
    """How many steps pass before the first difference above the bar."""
    return next((step for step, value in enumerate(differences) if value > BAR), len(differences))


def draw(live: dict[str, Rows], stepwise: dict[str, list[float]], alone: dict[str, list[float]], output: Path) -> None:
    """Rewards of the live runs, losses on the same rollouts, and how far those lie apart."""
    figure = blank_figure(width=12.0, height=3.4)
    reward, loss, gap = figure.subplots(1, 3)
    steps = range(1, len(stepwise[RECORDED]) + 1)
    for head, color in HEADS.items():
        style = {"color": color, "linewidth": 1.1, "label": head}
        reward.plot(steps, column(live[head], "reward/mean"), **style)
        loss.plot(steps, stepwise[head], **style, linestyle="-" if head == RECORDED else (0, (4, 4)))
    # A difference of nothing has no place on a logarithmic axis.
    lines = [
        ("two_pass, same weights", apart(stepwise["two_pass"], stepwise[RECORDED]), HEADS["two_pass"], "-"),
        ("full, same weights", apart(stepwise["full"], stepwise[RECORDED]), HEADS["full"], "-"),
        ("full, left alone", apart(alone["full"], stepwise[RECORDED]), HEADS["full"], ":"),
        (f"{LAST_BIT}, left alone", apart(alone[LAST_BIT], stepwise[RECORDED]), HEADS["one_pass"], ":"),
    ]
    for label, values, color, dashes in lines:
        gap.plot(
            steps, [max(value, 1e-11) for value in values], color=color, linestyle=dashes, linewidth=1.1, label=label
        )
    gap.axhline(BAR, color="#c5cbd3", linewidth=1.0)
    gap.set_yscale("log")
    dress(reward, "Training reward, live")
    dress(loss, "Loss, same recorded rollouts and weights")
    dress(gap, "Difference from one_pass")
    for axes in (reward, loss, gap):
        axes.legend(frameon=False, fontsize=7)
    output.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, output, dpi=130)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--folder", type=Path, help="where the runs go; a temporary one by default")
    parser.add_argument("--output", type=Path, help="the figure, a .png or .svg file")
    arguments = parser.parse_args()
    steps = 6 if arguments.quick else arguments.steps
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.folder or Path(scratch)).resolve()
        live = {head: live_run(folder, head, steps) for head in HEADS}
        stepwise, alone = replay((folder / RECORDED / "latest").resolve(), steps)
        if arguments.output is not None:
            draw(live, stepwise, alone, arguments.output)
    level = {head: statistics.mean(column(live[head], "reward/mean")[-LEVEL_STEPS:]) for head in HEADS}
    accuracy = {head: column(live[head], "eval/pass@1")[-1] for head in HEADS}
    figures = {
        "loss_difference_two_pass": max(apart(stepwise["two_pass"], stepwise[RECORDED])),
        "loss_difference_full": max(apart(stepwise["full"], stepwise[RECORDED])),
        "loss_difference_recorded": max(apart(column(live[RECORDED], "loss"), stepwise[RECORDED])),
        "largest_loss": max(abs(value) for value in stepwise[RECORDED]),
        "steps_within_bar_full_alone": steps_within(apart(alone["full"], stepwise[RECORDED])),
        "steps_within_bar_last_bit_alone": steps_within(apart(alone[LAST_BIT], stepwise[RECORDED])),
        **{f"reward_{head}": value for head, value in level.items()},
        "reward_spread": max(level.values()) - min(level.values()),
        "accuracy_before": column(live[RECORDED], "eval/pass@1")[0],
        **{f"accuracy_{head}": value for head, value in accuracy.items()},
        "accuracy_spread": max(accuracy.values()) - min(accuracy.values()),
    }
    bars = {"loss_difference_two_pass": ("<=", BAR), "loss_difference_full": ("<=", BAR)}
    common.report("head_curves", figures, bars, {"steps": steps, "quick": arguments.quick}, arguments.json)


if __name__ == "__main__":
    main()
