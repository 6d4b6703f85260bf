"""What a simulation found out: plain numbers, and tables of them for people."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from simulator.scenario import Scenario
from simulator.trainer import StepTimes
from simulator.world import World

Figures = dict[str, Any]
SHARES = ("staleness_shares", "actor_utilisation")


def simulate(scenario: Scenario, asynchronous: bool = True) -> Figures:
    """Simulate a scenario. Raises Violation where a promise of the synchronisation does not hold."""
    world = World(scenario, asynchronous)
    world.simulate()
    return figures_of(world)


def figures_of(world: World) -> Figures:
    """Sums up a world that has run: from the first batch on; counts of versions are of the whole simulation.

    Times are means per step. tokens_per_s: prompt and completion tokens trained on; actor_utilisation: share of time in
    which actors generate; versions_superseded: published, but replaced
    by a newer one before an actor applied it, summed over the actors; trainer_egress_versions: times that the trainer
    sent a whole version, per published one.
    """
    scenario, trainer, rollouts = world.scenario, world.trainer, world.rollouts
    steps, published = trainer.steps, len(world.published)
    count = max(len(steps), 1)
    means = {item.name: sum(getattr(step, item.name) for step in steps) / count for item in fields(StepTimes)}
    per_s = 1 / means["step_s"] if steps else 0.0
    samples = max(rollouts.staleness.total(), 1)
    # Both generated and trained tokens count from the first moment; what is trained lags behind by the start-up.
    # A batch that was handed out and not finished counts as trained for tokens, not for the rate.
    tokens_per_sample = rollouts.trained_tokens / samples + scenario.prompt_tokens
    return {
        "mode": "async" if world.asynchronous else "blocking",
        "steps": len(steps),
        "steps_per_hour": per_s * 3600,
        "tokens_per_s": tokens_per_sample * scenario.samples_per_batch * per_s,
        **means,
        "sync_stall_max_s": max((step.sync_stall_s for step in steps), default=0.0),
        "staleness_mean": sum(behind * number for behind, number in rollouts.staleness.items()) / samples,
        "staleness_shares": {str(behind): number / samples for behind, number in sorted(rollouts.staleness.items())},
        "actor_utilisation": sum(e.busy_s for e in rollouts.engines) / (scenario.actors * scenario.seconds),
        "tokens_generated": sum(engine.tokens for engine in rollouts.engines),
        "tokens_trained": rollouts.trained_tokens,
        "tokens_too_old": rollouts.stale_tokens,
        "tokens_unusable": rollouts.unusable_tokens,
        "groups_redone": rollouts.redone_groups,
        "versions_published": published,
        "versions_skipped": trainer.boundary.skipped,
        "versions_dropped": world.records["drop"],
        "versions_superseded": world.superseded,
        "pulls_gone": world.records["gone"],
        "lanes_lost": world.records["lost_lane"],
        "actors_lost": dict(sorted(world.lost.items())),
        "actor_crashes": sum(actor.crashes for actor in world.actors.values()),
        "actor_freezes": sum(actor.freezes for actor in world.actors.values()),
        "transfer_p50_s": _quantile(world.transfers, 0.5),
        "snapshot_to_applied_p50_s": _quantile(world.delays, 0.5),
        "snapshot_to_applied_p95_s": _quantile(world.delays, 0.95),
        "trainer_egress_versions": world.sent_bytes / (scenario.gigabytes * 1e9 * max(published, 1)),
    }


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)] if values else 0.0


def comparison_table(results: list[Figures]) -> str:
    """One column per simulation."""
    columns = [{name: _text(name, value) for name, value in result.items()} for result in results]
    width = max(len(cell) + 2 for column in columns for cell in column.values())
    lines = [f"{name.replace('_', ' '):34}{''.join(f'{one[name]:{width}}' for one in columns)}" for name in columns[0]]
    return "\n".join(map(str.rstrip, lines))


def _text(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_text(name, part)}" for key, part in value.items()) or "none"
    if isinstance(value, float):
        return f"{value:.1%}" if name in SHARES else f"{value:,.3f}"
    return value if isinstance(value, str) else f"{value:,}"
