"""What it costs to train on what an environment has said: a built-in task with observations masked, and without.

    python benchmarks/observation_mask.py --json
    python benchmarks/observation_mask.py --task guess --steps 60 --json

Ordinary runs in blocking mode, two for each seed. The second of them trains every observation together with the
turn before it and with its advantage, as if the policy had sampled both. An observation has no behaviour log-prob, so
both runs do without the correction that would ask for it; π/π_old of all tokens is the trainer's own.

    pass_masked, pass_unmasked    the last eval/pass@1, mean over the seeds
    masked_minus_unmasked         the difference
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


def run(folder: Path, task: str, masked: bool, seed: int, steps: int) -> float:
    """The last eval/pass@1 of one run."""
    common.progress(f"{'masked' if masked else 'unmasked'}, seed {seed}")
    settings = {
        "job.config_file": REPOSITORY / "train_configs" / f"{task}_cpu.toml",
        "job.dump_folder": folder / f"{masked}-{seed}",
        "model.hf_assets_path": folder / "outputs" / "assets" / f"debug_{task}",
        "training.seed": seed,
        "training.steps": steps,
        "training.threads": 1,
        "grpo.async_weight_update": "false",
        "grpo.off_policy_correction": "none",
        "rollout.max_staleness": 0,
        "eval.interval": steps,
        "checkpoint.enable": "false",
    }
    program = common.TRAIN if masked else (__file__, UNMASKED)
    rows = common.train(settings, program=program, seconds=RUN_SECONDS)
    return [float(row["eval/pass@1"]) for row in rows if "eval/pass@1" in row][-1]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--task", choices=("calculator", "guess"), default="calculator")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    seeds = range(1 if arguments.quick else arguments.seeds)
    steps = 2 if arguments.quick else arguments.steps
    with tempfile.TemporaryDirectory() as name:
        passed: dict[str, list[float]] = {"pass_masked": [], "pass_unmasked": []}
        for seed in seeds:
            for key, values in passed.items():
                values.append(run(Path(name), arguments.task, key == "pass_masked", seed, steps))
    figures = {key: statistics.mean(values) for key, values in passed.items()}
    figures["masked_minus_unmasked"] = figures["pass_masked"] - figures["pass_unmasked"]
    conditions = {"task": arguments.task, "steps": steps, "each": passed, "quick": arguments.quick}
    conditions["cpu"] = common.processor()
    common.report("observation_mask", figures, BARS, conditions, arguments.json)


if __name__ == "__main__":
    if sys.argv[1:2] == [UNMASKED]:
        from torchtitan.grpo_train import main as train

        train_on_observations()
        sys.exit(train(sys.argv[2:]))
    main()
