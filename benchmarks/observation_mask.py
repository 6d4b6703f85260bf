"""What it does to train on what an environment has said: a built-in task with observations masked, predicted, and
neither.

    python benchmarks/observation_mask.py --json
    python benchmarks/observation_mask.py --task guess --steps 60 --json

Ordinary runs in blocking mode, one of each kind for each seed. `predicted` adds the cross-entropy on observations
(grpo.observation_coefficient). `unmasked` trains every observation together with the turn before it and with its
advantage, as if the policy had sampled both. An observation has no behaviour log-prob, so all runs do without the
correction that would ask for it; π/π_old of all tokens is the trainer's own.

    pass_masked, pass_predicted, pass_unmasked      the last eval/pass@1, mean over the seeds
    masked_minus_unmasked, predicted_minus_masked   the differences
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from benchmarks import common  # noqa: E402
from torchtitan.inference.types import (  # noqa: E402
    Branch,
    Completion,
    Given,
)
from torchtitan.rollout.types import Batch  # noqa: E402
from torchtitan.trainer.policy_trainer import BatchResult, PolicyTrainer  # noqa: E402
from torchtitan.weight_sync.facade import WeightSync  # noqa: E402

BARS = {"masked_minus_unmasked": (">=", 0.02)}
UNMASKED = "--unmasked-run"
RUN_SECONDS = 1800


def with_observations(branch: Branch) -> Branch:
    """As if the policy had sampled what was given to it behind each of its turns."""
    segments = branch.segments[:1]
    for segment in branch.segments[1:]:
        turn = segments[-1]
        if isinstance(segment, Given) and isinstance(turn, Completion):
            log_probs = turn.log_probs + [0.0] * len(segment.token_ids)
            segments[-1] = replace(turn, token_ids=turn.token_ids + segment.token_ids, log_probs=log_probs)
        else:
            segments.append(segment)
    return Branch(segments)


def train_on_observations() -> None:
    """Have the trainer of this process do so."""
    real = PolicyTrainer.train_batch

    def train_batch(self: PolicyTrainer, batch: Batch, slots: WeightSync | None = None) -> BatchResult:
        for sample in batch.samples:
            sample.branches = [with_observations(branch) for branch in sample.branches]
        return real(self, batch, slots)

    PolicyTrainer.train_batch = train_batch  # type: ignore[method-assign]


def run(folder: Path, task: str, kind: str, seed: int, steps: int, coefficient: float) -> float:
    """The last eval/pass@1 of one run."""
    settings = {
        "job.config_file": REPOSITORY / "train_configs" / f"{task}_cpu.toml",
        "job.dump_folder": folder / f"{kind}-{seed}",
        "model.hf_assets_path": folder / "outputs" / "assets" / f"debug_{task}",
        "training.seed": seed,
        "training.steps": steps,
        "training.threads": 1,
        "grpo.async_weight_update": "false",
        "grpo.off_policy_correction": "none",
        "grpo.observation_coefficient": coefficient if kind == "predicted" else 0.0,
        "rollout.max_staleness": 0,
        "eval.interval": steps,
        "checkpoint.enable": "false",
    }
    program = (__file__, UNMASKED) if kind == "unmasked" else common.TRAIN
    rows = common.train(settings, program=program, seconds=RUN_SECONDS)
    passed = [float(row["eval/pass@1"]) for row in rows if "eval/pass@1" in row]
    observed = [row["observation/loss"] for row in rows if "observation/loss" in row]
    said = f", cross-entropy of observations {observed[0]:.3f} → {observed[-1]:.3f}" if observed else ""
    common.progress(f"{kind}, seed {seed}: pass@1 {passed}{said}")
    return passed[-1]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--task", choices=("calculator", "guess"), default="calculator")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--kinds", default="masked,predicted,unmasked", help="of runs")
    parser.add_argument("--coefficient", type=float, default=0.1, help="of predicted observations")
    arguments = parser.parse_args()
    seeds = range(1 if arguments.quick else arguments.seeds)
    steps = 2 if arguments.quick else arguments.steps
    with tempfile.TemporaryDirectory() as name:
        passed: dict[str, list[float]] = {f"pass_{kind}": [] for kind in arguments.kinds.split(",")}
        for seed in seeds:
            for key, values in passed.items():
                kind = key.removeprefix("pass_")
                values.append(run(Path(name), arguments.task, kind, seed, steps, arguments.coefficient))
    figures = {key: statistics.mean(values) for key, values in passed.items()}
    for more, less in (("masked", "unmasked"), ("predicted", "masked")):
        if f"pass_{more}" in figures and f"pass_{less}" in figures:
            figures[f"{more}_minus_{less}"] = figures[f"pass_{more}"] - figures[f"pass_{less}"]
    conditions = {"task": arguments.task, "steps": steps, "each": passed, "quick": arguments.quick}
    conditions["coefficient"] = arguments.coefficient
    conditions["cpu"] = common.processor()
    common.report("observation_mask", figures, BARS, conditions, arguments.json)


if __name__ == "__main__":
    if sys.argv[1:2] == [UNMASKED]:
        from torchtitan.grpo_train import main as train

        train_on_observations()
        sys.exit(train(sys.argv[2:]))
    main()
