"""Evaluations after a run are those of the run, to the last bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from torchtitan.utils.json_lines import read_json_lines

ROOT = Path(__file__).resolve().parents[2]

# What is judged, of every evaluation in this process, goes to a file: tokens, log-probs, and whether it is a whole.
SCRIPT = """
import json
from pathlib import Path
from torchtitan import evaluate, train
from torchtitan.trainer.evaluation import Evaluator
judged, score = [], Evaluator._score
async def noted(self, prompts, trajectories, deadline):
    sampled = [one.branches[0].sampled[0] for group in trajectories for one in group]
    judged.append([[one.token_ids, one.log_probs] for one in sampled])
    return await score(self, prompts, trajectories, deadline)
Evaluator._score = noted
def digits(completions, **kwargs):
    return [float(text[:1].isdigit()) for text in completions]
settings = {
    "training.steps": 2, "training.global_batch_size": 64, "training.threads": 1, "grpo.num_minibatches": 1,
    "eval.interval": 1, "eval.num_prompts": 24, "eval.samples_per_prompt": 3,
    "eval.set": [
        {"name": "digits"},
        {"name": "sums", "reward_function": "arithmetic", "num_prompts": 8, "interval": 0},
    ],
    "checkpoint.interval": 1, "checkpoint.async_mode": "async", "checkpoint.export_dtype": "float32",
    "inference.threads_per_actor": 1,
}
run = train("debug_cpu", settings, model="debug_random", rewards=digits)
in_run = judged[:]
judged.clear()
kept = sorted(str(path) for path in run.folder.rglob("*"))
code = evaluate.main([str(run.folder), str(run.folder / "hf" / "step-2"), "--output", "curve.json"])
rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines() if "eval/version" in line]
untouched = kept == sorted(str(path) for path in run.folder.rglob("*"))
Path("found.json").write_text(json.dumps([code, in_run, judged, rows, untouched]))
"""
NOT_OF_THE_POLICY = ("step", "time", "checkpoint", "policy_version", "version", "time_s", "redone")


def of_the_policy(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key.rpartition("/")[2] not in NOT_OF_THE_POLICY}


@pytest.mark.exhaustive
def test_evaluations_of_checkpoints_and_export_equal_those_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCHTITAN_DEVICE": "cpu"},
        timeout=12 * PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    code, in_run, after, rows, untouched = json.loads((tmp_path / "found.json").read_text())
    assert code == 0 and untouched and "checkpoint/step-1" in done.stdout and "hf/step-2" in done.stdout
    # After step 1, one of the two sets is due.
    (_, _, first, second, sums) = in_run
    assert first != second and len(second) == 24 * (3 + 1) and len(sums) == 8 * (3 + 1)
    # The checkpoints of steps 1 and 2, then the export: both sets of each.
    assert [after[0], *after[2:]] == [first, second, sums, second, sums]
    curve = json.loads((tmp_path / "curve.json").read_text())["evaluations"]
    assert [(Path(row["checkpoint"]).name, row["eval/version"]) for row in curve] == [
        ("step-1", 1), ("step-2", 2), ("step-2", 0)
    ]  # fmt: skip
    figures, expected = [of_the_policy(row) for row in curve], [of_the_policy(row) for row in rows]
    assert figures[1:] == [expected[2], expected[2]] and "eval/pass@1" not in expected[1]
    assert expected[1] == {key: value for key, value in figures[0].items() if key in expected[1]}
    files = [Path(line) for line in done.stdout.splitlines() if line.endswith("completions.jsonl")]
    assert [len(read_json_lines(tmp_path / file)) for file in files] == [2 * 32 * (3 + 1), 32 * (3 + 1)]
    written = [row for row in read_json_lines(tmp_path / files[0]) if (row["step"], row["source"]) == (1, "digits")]
    assert [row["tokens"] for row in written] == [len(tokens) for tokens, _ in first]
    assert [row["greedy"] for row in written] == [False] * 72 + [True] * 24
    sampled = [row["rewards"]["digits"] for row in written if not row["greedy"]]
    assert sum(sampled) / 72 == pytest.approx(figures[0]["eval/digits/pass@1"])
    assert {"eval/digits/pass@2", "eval/sums/pass@2", "eval/interval_low"} <= set(figures[0])
