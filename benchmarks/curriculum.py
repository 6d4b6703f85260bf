"""How many groups must be sampled for the same learning: with a curriculum, and with groups dropped that teach nothing.

    python benchmarks/curriculum.py --json --folder outputs/curriculum

The default run (train_configs/debug_cpu.toml) with as many steps, on as many groups: `dropped` has
grpo.drop_zero_variance alone, `curriculum` also [curriculum] with its defaults. With --folder, runs that have ended are
taken as they are.

    groups_ratio       groups that were sampled, with the curriculum ÷ without, of all seeds together
    pass_difference    the last pass@1 on all held-out prompts, with minus without, mean over the seeds
    seconds_ratio      of the runs
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import common

from torchtitan.utils.json_lines import read_json_lines

BARS = {"groups_ratio": ("<=", 0.5), "pass_difference": (">=", -0.01)}
KINDS: dict[str, dict[str, object]] = {"dropped": {}, "curriculum": {"curriculum.enable": "true"}}
RUN_SECONDS = 3600


def run(folder: Path, kind: str, seed: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Groups, pass@1 and seconds of one run."""
    name = f"{kind}-{seed}"
    settings: dict[str, Any] = {
        "job.config_file": common.REPOSITORY / "train_configs" / "debug_cpu.toml",
        "job.dump_folder": folder / name,
        "training.seed": seed,
        "training.steps": arguments.steps,
        "grpo.drop_zero_variance": "true",
        "eval.num_prompts": 8 if arguments.quick else 505,
        "checkpoint.enable": "false",
        **({"training.global_batch_size": 64} if arguments.quick else {}),
        **KINDS[kind],
    }
    if arguments.model:
        settings["model.hf_assets_path"] = arguments.model.resolve()

    def work() -> str:
        common.train(settings, seconds=RUN_SECONDS)
        return "trained"

    note = folder / "notes" / f"{name}.json"
    common.once(note, settings, work)
    rows = read_json_lines(folder / name / "latest" / "metrics.jsonl")
    return {
        "groups": sum(row.get("groups/scored", 0.0) for row in rows),
        "pass": [row["eval/pass@1"] for row in rows if row.get("eval/pass@1") is not None][-1],
        "seconds": float(json.loads(note.read_text())["seconds"]),
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--model", type=Path, help="in place of the checkpoint of the configuration")
    parser.add_argument("--folder", type=Path, help="where runs are kept; those that have ended are taken")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.steps = 1, 3
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        for seed in range(arguments.seeds):
            for kind, ended in found.items():
                ended.append(run(folder, kind, seed, arguments))
                common.progress(f"{kind}, seed {seed}: {ended[-1]}")
    ours, theirs = found["curriculum"], found["dropped"]
    figures = {
        "groups_ratio": sum(one["groups"] for one in ours) / sum(one["groups"] for one in theirs),
        "pass_difference": statistics.fmean(a["pass"] - b["pass"] for a, b in zip(ours, theirs, strict=True)),
        "seconds_ratio": sum(one["seconds"] for one in ours) / sum(one["seconds"] for one in theirs),
    }
    conditions = {"steps": arguments.steps, "each": found, "quick": arguments.quick, "cpu": common.processor()}
    common.report("curriculum", figures, BARS, conditions, arguments.json)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
