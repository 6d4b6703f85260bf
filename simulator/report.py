"""Figures as tables for people."""

from __future__ import annotations

from simulator.figures import Figures
from simulator.scenario import Scenario, key_texts
from simulator.split import Split

SPLITS_SHOWN = 8


def settings_table(scenario: Scenario, origins: dict[str, str]) -> str:
    """Every key with its value and where that comes from."""
    defaults, texts = Scenario().values(), key_texts()
    lines = ["key                          value        from       meaning"]
    for name, value in scenario.values().items():
        if name in origins or name in texts:
            origin = origins.get(name, "default" if value == defaults[name] else "")
            lines.append(f"{name:28} {_short(value):12} {origin:10} {texts.get(name, 'see docs/config.md')}")
    return "\n".join(lines)


def comparison_table(results: list[Figures]) -> str:
    """One column per simulation."""
    rows: list[tuple[str, list[str]]] = [
        ("steps per hour", [f"{r.steps_per_hour:,.1f}" for r in results]),
        ("tokens per second (trained)", [f"{r.tokens_per_s:,.0f}" for r in results]),
        ("step, mean", [f"{r.step_s:.3f} s" for r in results]),
        ("  train", [_part(r.train_s, r) for r in results]),
        ("  data wait", [_part(r.data_wait_s, r) for r in results]),
        ("  snapshot", [_part(r.snapshot_s, r) for r in results]),
        ("  sync stall", [_part(r.sync_stall_s, r) for r in results]),
        ("sync stall, longest", [f"{r.sync_stall_max_s:.3f} s" for r in results]),
        ("staleness, mean", [f"{r.staleness_mean:.2f} versions" for r in results]),
        ("staleness, shares", [_shares(r) for r in results]),
        ("actors generating", [f"{r.actor_utilisation:.1%} of the time" for r in results]),
        ("actors' tokens", [f"{r.actor_load:.1%} of full" for r in results]),
        ("tokens too old", [_of_generated(r.tokens_too_old, r) for r in results]),
        ("versions published", [f"{r.versions_published:,}" for r in results]),
        ("  skipped", [f"{r.versions_skipped:,}" for r in results]),
        ("  dropped", [f"{r.versions_dropped:,}" for r in results]),
        ("  applied per actor and version", [f"{_per_delivery(r.versions_applied, r):.2f}" for r in results]),
        ("  superseded before they were", [f"{_per_delivery(r.versions_superseded, r):.2f}" for r in results]),
        ("transfer, median", [f"{r.transfer_p50_s:.3f} s" for r in results]),
        ("snapshot to applied, p50 / p95", [
            f"{r.snapshot_to_applied_p50_s:.2f} / {r.snapshot_to_applied_p95_s:.2f} s" for r in results
        ]),
        ("trainer's egress per version", [f"{r.trainer_egress_versions:.2f} × its bytes" for r in results]),
        ("attempts aborted", [f"{r.attempts_aborted:,}" for r in results]),
        ("evictions", [_evictions(r) for r in results]),
        ("actor crashes, freezes", [f"{r.actor_crashes}, {r.actor_freezes}" for r in results]),
        ("groups redone", [f"{r.groups_redone:,}" for r in results]),
    ]  # fmt: skip
    width = max(24, *(len(cell) + 2 for _, cells in rows for cell in cells))
    head = " " * 34 + "".join(f"{r.mode:<{width}}" for r in results)
    lines = [head.rstrip()]
    lines += [(f"{name:34}" + "".join(f"{cell:<{width}}" for cell in cells)).rstrip() for name, cells in rows]
    return "\n".join(lines)


def split_table(gpus: int, splits: list[Split]) -> str:
    """The best split and the next ones."""
    best = splits[0]
    lines = [
        f"Best split of {gpus} GPUs: {best.ranks} trainer ranks and {best.actors} actors",
        "ranks  actors  tokens/s     steps/hour  data wait  actors generating",
    ]
    lines += [
        f"{s.ranks:5}  {s.actors:6}  {s.figures.tokens_per_s:11,.0f}  {s.figures.steps_per_hour:10,.1f}"
        f"  {_share(s.figures.data_wait_s, s.figures):9.1%}  {s.figures.actor_utilisation:.1%}"
        for s in splits[:SPLITS_SHOWN]
    ]
    return "\n".join(lines)


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _share(seconds: float, result: Figures) -> float:
    return seconds / result.step_s if result.step_s else 0.0


def _part(seconds: float, result: Figures) -> str:
    return f"{seconds:.3f} s ({_share(seconds, result):.1%})"


def _shares(result: Figures) -> str:
    return ", ".join(f"{behind}: {share:.1%}" for behind, share in result.staleness_shares.items())


def _of_generated(tokens: float, result: Figures) -> str:
    return f"{tokens / result.tokens_generated:.1%} of generated" if result.tokens_generated else "0"


def _per_delivery(count: int, result: Figures) -> float:
    deliveries = result.versions_applied + result.versions_superseded
    return count / deliveries if deliveries else 0.0


def _evictions(result: Figures) -> str:
    phases = ", ".join(f"{phase} {count}" for phase, count in result.evictions_by_phase.items())
    return f"{result.evictions}" + (f" ({phases})" if phases else "")
