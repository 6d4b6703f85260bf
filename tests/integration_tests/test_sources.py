"""Three sources in whole runs: killed and resumed, and one whose environment is killed for good."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.processes import ROOT, Processes
from tests.runs import BRIEF, Run
from torchtitan.rollout.flow.journal import ReplaySource
from torchtitan.trainer.run_dir import whole_steps
from torchtitan.utils.json_lines import read_json_lines

DIGITS = "tests.unit_tests.rollout.reward_examples:share_of_digits"
WEIGHTS = {"sums": 1.0, "fragile": 1.0, "long": 1.5}
GROUPS = 12
SOURCES = f"""
[[source]]
name = "sums"
rewards.functions = ["{DIGITS}"]

[[source]]
name = "fragile"
rollout.dataset = "%s"
environment = {{ factory = "tests.fragile_environment:Fragile", sandbox.isolate = false }}
rewards.functions = []
required = false

[[source]]
name = "long"
weight = 1.5
rewards.functions = ["{DIGITS}", "length"]
rewards.weights = [1.0, 0.01]
rollout.max_completion_tokens = 12
"""


@pytest.mark.exhaustive
def test_three_sources_survive_a_kill_and_the_end_of_one_environment(
    debug_checkpoint: Path, processes: Processes, tmp_path: Path
) -> None:
    fatal, rows = tmp_path / "fatal", tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": f"{a}+{b}=", "fatal": str(fatal)}) for a in range(10, 30) for b in range(10, 30)]
    rows.write_text("\n".join(lines))
    config = tmp_path / "mix.toml"
    config.write_text((ROOT / "train_configs" / "debug_cpu.toml").read_text() + SOURCES % rows)

    def start(*options: str) -> Run:
        brief = list(BRIEF)
        at = brief.index("--rewards.functions")
        return Run(
            processes, "debug_cpu", debug_checkpoint, tmp_path / "runs", *brief[:at], *brief[at + 2 :],
            "--job.config_file", str(config), "--training.global_batch_size", str(8 * GROUPS),
            "--checkpoint.interval", "2", *options,
        )  # fmt: skip

    run = start("--training.steps", "1000")
    folder = run.folder / "checkpoint"
    run.wait(lambda: len(whole_steps(folder)) > 1)
    run.end(-signal.SIGKILL, by=signal.SIGKILL)
    killed_at = whole_steps(folder)[-1]
    steps = killed_at + 8
    run = start("--training.steps", str(steps), "--checkpoint.resume", str(folder.parent))
    # The rows of the killed run that stand behind the checkpoint are still there when the resumed one begins.
    run.wait(lambda: len(read_json_lines(folder.parent / "epochs.jsonl")) == 2)
    run.wait(lambda: whole_steps(folder)[-1] > killed_at)
    fatal.touch()
    run.end()
    (left,) = run.events("source_left")
    assert left["source"] == "fragile" and "no reward at all" in left["reason"] and left["version"] < steps
    source = ReplaySource(run.folder)
    batches = [source.read_batch(version).groups for version in source.versions]
    assert len(batches) == steps
    counts: Counter[str] = Counter()
    used: dict[str, list[int]] = {name: [] for name in WEIGHTS}
    for version, groups in enumerate(batches):
        counts.update(group.source for group in groups)
        assert len(groups) == GROUPS
        for group in groups:
            used[group.source].append(group.prompt_index // len(WEIGHTS))
        if version < left["version"]:
            for name, weight in WEIGHTS.items():
                assert abs(counts[name] - GROUPS * (version + 1) * weight / sum(WEIGHTS.values())) < 1
    assert counts["fragile"] and not any(group.source == "fragile" for group in batches[-1])
    # The same prompts in the same order as without the kill, and none twice.
    for name in ("sums", "long"):
        assert used[name] == list(range(len(used[name])))
    assert len(set(used["fragile"])) == len(used["fragile"])
    last = run.steps()[-1]
    assert last["groups/sums/trained"] + last["groups/long/trained"] == GROUPS
    assert "reward/sums/mean" in last and "completion/long/length_mean" in last
    written = read_json_lines(run.folder / "completions.jsonl")
    assert {row["source"] for row in written} == set(WEIGHTS)
