"""What benchmarks show of the product, in little. The others run with `--benchmarks` and say what they promise; what
they measure here means nothing."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.namespaces import slow_network
from tests.runs import RUN_SECONDS

REPOSITORY = Path(__file__).parents[2]
# Of the weight synchronisation.
SCENARIOS = {
    "stall": {
        "frozen_step_ratio",
        "publish_step_ratio",
        "sync_stall_p50_share",
        "sync_stall_p99_share",
        "frozen_share_of_steps",
        "published_share_healthy",
    },
    "overlap": {"share_of_ideal", "gain", "published_share_async"},
    "snapshot": {"snapshot_ratio"},
    "bandwidth": {"share_of_socket", "times_faster_than_broadcast"},
    "plan": {"plan_s", "growth_per_version"},
    "fanout": {"egress_growth_1_to_2", "egress_mb_relay_2", "egress_copies_one_host"},
    "registry": {"registry_share", "join_storm_s", "status_bytes_s", "actor_start_pull_ms"},
    "rough": {"tokens", "versions_published", "step_p50_s"},
    "slow": {"healthy_gap_versions", "healthy_gap_versions_four_slots", "healthy_gap_versions_ten"},
}
KEYS = {
    "accuracy_hostile": {"accuracy_seconds_worst", "clock_worst_s"},
    "agents": {"prefill_saved", "gateway_overhead"},
    "engine_log_probs": {"share_equal", "share_equal_packs"},
    "learning": {"sft_loss", "grpo_gain"},
    "self_distillation": {"won_grpo", "won_ema"},
    "optimizer_step": {"muon_vs_adamw", "muon_vs_adamw_step", "muon_two_ranks"},
    "foreign_answers": {"hold_ms", "wait_more_ms"},
    "packing": {"fill", "fill_merged", "speedup_merged", "speedup_few_groups"},
    "shared_prefix": {"speedup_g16", "peak_ratio_g16", "gradient_difference", "speedup_episode"},
}
SHARES = {
    "share_equal",
    "share_equal_packs",
    "frozen_share_of_steps",
    "published_share_healthy",
    "published_share_async",
}
# In two steps nothing is.
LEARNT = {"grpo_gain", "won_grpo", "won_ema"}
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in listed.stdout.splitlines() if line}


def run_scenario(name: str, keys: set[str], *options: str, timeout_s: float = 280) -> dict[str, float]:
    """A scenario of the weight synchronisation; see run_quickly."""
    return run_program(["-m", "benchmarks.weight_sync", name, *options], f"weight_sync_{name}", keys, timeout_s)


def run_quickly(name: str, keys: set[str], *options: str, timeout_s: float = 280) -> dict[str, float]:
    """Its last line is the object with these figures; what they are worth is not asked."""
    return run_program([str(REPOSITORY / "benchmarks" / f"{name}.py"), *options], name, keys, timeout_s)


def run_program(words: list[str], name: str, keys: set[str], timeout_s: float) -> dict[str, float]:
    command = [sys.executable, *words, "--quick", "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["benchmark"] == name and result["conditions"]["quick"] is True
    figures = result["figures"]
    assert figures.keys() >= keys
    assert all(math.isfinite(value) for value in figures.values()), figures
    for key in SHARES & figures.keys():
        assert 0 < figures[key] <= 1, key
    for key in keys - SHARES - LEARNT:
        assert figures[key] > 0, key
    return dict(figures)


@pytest.mark.benchmark
@pytest.mark.timeout(RUN_SECONDS + 60)
def test_a_run_goes_on_by_itself_where_ranks_are_killed_and_told_to_go(debug_checkpoint: Path) -> None:
    """Every step is there once, at most one checkpoint interval (4) was trained again, and the server stayed. A rank
    that was told to go has the run save before."""
    figures = run_quickly(
        "rank_deaths", {"deaths", "server_lived"}, "--model", str(debug_checkpoint), timeout_s=RUN_SECONDS
    )
    assert figures["exit_code"] == figures["steps_missing_or_double"] == 0
    assert figures["deaths"] == 2 and figures["server_lived"] == 1
    assert figures["most_steps_again"] <= 4 and figures["steps_again_of_sigterm"] == 0


@pytest.mark.exhaustive
def test_each_hostile_actor_is_refused_for_what_it_does() -> None:
    figures = run_scenario("hostile", {"kinds_refused"})
    assert figures["kinds_refused"] == 11 and figures["steps"] == figures["steps_without"] == 25


@pytest.mark.benchmark
@pytest.mark.parametrize("name", KEYS)
def test_benchmark_ends_with_its_figures(name: str) -> None:
    run_quickly(name, KEYS[name])


@pytest.mark.benchmark
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_ends_with_its_figures_and_leaves_nothing_behind(name: str) -> None:
    isolated = name == "overlap"
    if isolated and (os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None):
        pytest.skip("needs root and iproute2")
    if name in ("stall", "overlap") and CORES < 2:
        pytest.skip("needs two cores")
    before = namespaces() if isolated else set()
    run_scenario(name, SCENARIOS[name])
    if isolated:
        assert namespaces() <= before, "namespaces are left behind"


@pytest.mark.exhaustive
def test_every_sabotage_of_an_embedded_engine_is_noticed_and_nothing_else() -> None:
    assert run_scenario("sabotage", set()) == {"missed": 0, "false_alarms": 0}


def test_namespaces_are_refused_clearly_without_their_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="root and iproute2"), slow_network(["a"], 10.0):
        raise AssertionError("never gets here")
