"""A live run with adapters: few bytes per version, an actor that has them, a resumed run, and what is exported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.policies import make_debug_checkpoint
from tests.processes import Processes
from tests.runs import BRIEF, RUN_SECONDS, Run
from torchtitan.config.job_config import Lora
from torchtitan.models.hf_checkpoint import load_adapter, load_policy
from torchtitan.models.lora import add_adapters

pytestmark = pytest.mark.timeout(2 * RUN_SECONDS)

SETTINGS = Lora(rank=4, alpha=8.0)


def run(processes: Processes, checkpoint: Path, dump: Path, steps: int, *options: str) -> Run:
    """A few steps of the debug run, to their end."""
    started = Run(
        processes, "debug_cpu", checkpoint, dump,
        "--lora.rank", str(SETTINGS.rank),
        "--lora.alpha", str(SETTINGS.alpha),
        "--training.steps", str(steps),
        "--grpo.kl_coefficient", "0.01",
        "--optimizer.lr", "2e-3",
        *BRIEF, *options,
    )  # fmt: skip
    started.end()
    return started


@pytest.mark.exhaustive
def test_a_run_on_a_base_of_four_bits(processes: Processes, tmp_path: Path) -> None:
    """In blocking mode: every step waits for the actor, which stays awake."""
    checkpoint = tmp_path / "checkpoint"
    make_debug_checkpoint(checkpoint)
    options = ("--lora.base_bits", "4", "--grpo.async_weight_update", "false")
    run_dir = run(processes, checkpoint, tmp_path, 4, *options).folder
    resumed = run(processes, checkpoint, tmp_path, 12, *options, "--checkpoint.resume", str(run_dir))
    rows = resumed.steps()
    assert [row["step"] for row in rows] == list(range(1, 13))
    # After a resume the first batch may be of finished rollouts, and trained before the actor has joined.
    waited = [row for row in rows if "weight_sync/actor-0/version" in row]
    assert len(waited) >= 8 and all(row["weight_sync/actor-0/version"] == row["policy_version"] for row in waited)
    # It learns, and what the actor samples with is what the trainer trains, four bits and all.
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.15, rewards
    same = [row["mismatch_kl/same_version"] for row in rows if row["mismatch_kl/same_version"] is not None]
    assert same and max(same) < 1e-6
    assert 0 <= rows[0]["reference_kl"] < 1e-6 < rows[-1]["reference_kl"]
    norm, applied = (rows[-1][f"weight_sync/actor-0/{key}"] for key in ("adapter_norm", "adapter_applied_norm"))
    assert norm > 0 and applied == pytest.approx(norm, rel=1e-3)
    assert resumed.events("weights_probed") and not resumed.events("weights_differ")
    assert any(row["time/probe_s"] > 0 for row in rows)


def test_a_run_with_adapters(processes: Processes, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    policy = make_debug_checkpoint(checkpoint)
    finished = run(processes, checkpoint, tmp_path, 4)
    run_dir, rows = finished.folder, finished.steps()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    # What the actor sampled with is what the trainer trains.
    same = [row["mismatch_kl/same_version"] for row in rows if row["mismatch_kl/same_version"] is not None]
    assert same and max(same) < 1e-6
    assert 0 <= rows[0]["reference_kl"] < 1e-6 < rows[-1]["reference_kl"]
    norm, applied = (rows[-1][f"weight_sync/actor-0/{key}"] for key in ("adapter_norm", "adapter_applied_norm"))
    assert norm > 0 and applied == pytest.approx(norm, rel=1e-3)
    whole = 4 * sum(parameter.numel() for parameter in policy.parameters())
    # A step may deliver two versions.
    assert 0 < max(row["weight_sync/bytes_full"] or 0 for row in rows) < 0.2 * whole
    # The base is in no checkpoint; merged, it is base + adapter.
    stored = sum(path.stat().st_size for path in (run_dir / "checkpoint" / "step-4").iterdir())
    assert stored < 0.5 * whole
    adapted = load_policy(checkpoint)
    add_adapters(adapted, SETTINGS)
    load_adapter(adapted, run_dir / "adapter" / "step-4")
    tokens = torch.arange(2, 14).view(2, 6)
    merged = load_policy(run_dir / "hf" / "step-4")
    torch.testing.assert_close(adapted.logits(tokens), merged.logits(tokens), rtol=0, atol=1e-5)
    assert not torch.equal(merged.logits(tokens), policy.logits(tokens))
    names = load_file(run_dir / "adapter" / "step-4" / "adapter_model.safetensors")
    assert len(names) == 2 * 7 * policy.args.num_hidden_layers
