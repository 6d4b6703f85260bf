"""What a simulation found out, as plain numbers."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from simulator.scenario import Scenario
from simulator.trainer import StepTimes, total
from simulator.world import World


@dataclass(frozen=True)
class Figures:
    """Measured from the first batch on; counts of versions are of the whole simulation. Times are means per step."""

    mode: str
    steps: int
    steps_per_hour: float
    tokens_per_s: float
    """Prompt and completion tokens trained on"""
    step_s: float
    train_s: float
    data_wait_s: float
    snapshot_s: float
    sync_stall_s: float
    """What the trainer waits for actors, besides the snapshot"""
    sync_stall_max_s: float
    staleness_mean: float
    staleness_shares: dict[str, float]
    """Versions that a sample's oldest token was behind -> share of the samples trained on"""
    actor_utilisation: float
    """Share of time in which actors generate"""
    actor_load: float
    """Tokens generated as a share of what full actors would"""
    tokens_generated: float
    tokens_trained: int
    tokens_too_old: int
    tokens_unusable: int
    groups_redone: int
    versions_published: int
    versions_skipped: int
    versions_dropped: int
    versions_applied: int
    """Sum over the actors"""
    versions_superseded: int
    """Published, but replaced by a newer one before an actor applied it; sum over the actors"""
    attempts_aborted: int
    evictions: int
    evictions_by_phase: dict[str, int]
    actor_crashes: int
    actor_freezes: int
    transfer_p50_s: float
    snapshot_to_applied_p50_s: float
    snapshot_to_applied_p95_s: float
    trainer_egress_versions: float
    """Times that the trainer sent a whole version, per published one"""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def simulate(scenario: Scenario, asynchronous: bool = True) -> Figures:
    """Simulate a scenario. Raises ProtocolBroken where an invariant of the protocol does not hold."""
    world = World(scenario, asynchronous)
    world.run()
    return figures_of(world)


def figures_of(world: World) -> Figures:
    """Sums up a world that has run."""
    scenario, trainer, rollouts = world.scenario, world.trainer, world.rollouts
    steps = trainer.steps
    sums = total(steps)
    count = len(steps)
    mean = StepTimes(*(value / max(count, 1) for value in vars(sums).values()))
    per_s = 1 / sums.step_s if sums.step_s else 0.0
    # Both generated and trained tokens count from the first moment; what is trained lags behind by the start-up.
    # A batch that was handed out and not finished counts as trained for tokens, not for the rate.
    prompt_tokens = count * scenario.samples_per_batch * scenario.prompt_tokens
    handed_out = sum(rollouts.staleness.values()) / scenario.samples_per_batch
    completed = rollouts.trained_tokens * count / handed_out if handed_out else 0.0
    samples = sum(rollouts.staleness.values())
    shares = {str(behind): rollouts.staleness[behind] / samples for behind in sorted(rollouts.staleness)}
    generated = sum(engine.tokens for engine in rollouts.engines)
    seconds = scenario.seconds
    capacity = sum(engine.tokens_per_s for engine in rollouts.engines) * seconds
    full_bytes = scenario.gigabytes * 1e9
    published = len(world.published)
    return Figures(
        mode="async" if world.asynchronous else "blocking",
        steps=count,
        steps_per_hour=count * per_s * 3600,
        tokens_per_s=(completed + prompt_tokens) * per_s,
        step_s=mean.step_s,
        train_s=mean.train_s,
        data_wait_s=mean.data_wait_s,
        snapshot_s=mean.snapshot_s,
        sync_stall_s=mean.stall_s,
        sync_stall_max_s=max((step.stall_s for step in steps), default=0.0),
        staleness_mean=sum(behind * number for behind, number in rollouts.staleness.items()) / max(samples, 1),
        staleness_shares=shares,
        actor_utilisation=sum(engine.busy_s for engine in rollouts.engines) / (scenario.actors * seconds),
        actor_load=generated / capacity,
        tokens_generated=generated,
        tokens_trained=rollouts.trained_tokens,
        tokens_too_old=rollouts.stale_tokens,
        tokens_unusable=rollouts.unusable_tokens,
        groups_redone=rollouts.redone_groups,
        versions_published=published,
        versions_skipped=trainer.skipped,
        versions_dropped=world.records["drop"],
        versions_applied=world.applied,
        versions_superseded=world.superseded,
        attempts_aborted=world.records["abort"],
        evictions=sum(world.evictions.values()),
        evictions_by_phase=dict(sorted(world.evictions.items())),
        actor_crashes=sum(actor.crashes for actor in world.targets.values()),
        actor_freezes=sum(actor.freezes for actor in world.targets.values()),
        transfer_p50_s=_quantile(world.transfers, 0.5),
        snapshot_to_applied_p50_s=_quantile(world.delays, 0.5),
        snapshot_to_applied_p95_s=_quantile(world.delays, 0.95),
        trainer_egress_versions=sum(courier.sent_bytes for courier in world.couriers) / full_bytes / max(published, 1),
    )


def _quantile(values: list[float], share: float) -> float:
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]
