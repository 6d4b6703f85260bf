"""Simulates an hour of training in virtual time, on the real classes of the weight synchronisation.

    python -m tests.simulator --ranks 64 --actors 32 --train_s 8
    python -m tests.simulator scenario.toml --from-run outputs/latest

Every key of the scenario is a flag; --help lists them. See docs/sync_simulator.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from tests.simulator.measured import values_from_run
from tests.simulator.scenario import Scenario, known_keys
from tests.simulator.world import StepTimes, World
from torchtitan.config.values import read_toml, show, value_of_words
from torchtitan.errors import ConfigError, UserError

Figures = dict[str, Any]


def simulate(scenario: Scenario, asynchronous: bool = True) -> Figures:
    """Simulate a scenario. Raises Violation if the synchronisation breaks a promise."""
    world = World(scenario, asynchronous)
    world.simulate()
    return figures_of(world)


def figures_of(world: World) -> Figures:
    """Summarise a world that has run, from the first batch on; counts of versions cover the whole simulation.

    Times are means per step. tokens_per_s: prompt and completion tokens trained on; actor_utilisation: the share of
    time in which actors generate; versions_superseded: published versions that an actor skipped because a newer one
    came first, over all actors; trainer_egress_versions: whole versions that the trainer sent, per published one.
    """
    scenario, trainer, rollouts = world.scenario, world.trainer, world.rollouts
    steps, published = trainer.steps, len(world.published)
    count = max(len(steps), 1)
    means = {item.name: sum(getattr(step, item.name) for step in steps) / count for item in fields(StepTimes)}
    per_s = 1 / means["step_s"] if steps else 0.0
    samples = max(rollouts.staleness.total(), 1)
    # Generated and trained tokens both count from the start; training lags behind by the start-up. A batch that was
    # handed out but not finished counts for the trained tokens, not for the rate.
    tokens_per_sample = rollouts.trained_tokens / samples + scenario.prompt_tokens
    return {
        "mode": "async" if world.asynchronous else "blocking",
        "steps": len(steps),
        "steps_per_hour": per_s * 3600,
        "tokens_per_s": tokens_per_sample * scenario.groups_per_batch * scenario.group_size * per_s,
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
        "pulls_aborted": world.records["aborted"],
        "snapshots_lost": world.records["lost_snapshot"],
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
    """Format one column per simulation."""
    columns = [{name: _text(name, value) for name, value in result.items()} for result in results]
    width = max(len(cell) + 2 for column in columns for cell in column.values())
    lines = [f"{name.replace('_', ' '):34}{''.join(f'{col[name]:{width}}' for col in columns)}" for name in columns[0]]
    return "\n".join(map(str.rstrip, lines))


def _text(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_text(name, part)}" for key, part in value.items()) or "none"
    if isinstance(value, float):
        return f"{value:.1%}" if name in ("staleness_shares", "actor_utilisation") else f"{value:,.3f}"
    return value if isinstance(value, str) else f"{value:,}"


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the options; keys of the scenario become `key:NAME`."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulator", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("scenario", nargs="?", help="TOML file with keys of the scenario")
    parser.add_argument("--from-run", type=Path, metavar="RUN_DIR", help="take what a run measured")
    parser.add_argument("--mode", choices=["both", "async", "blocking"], default="both")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.add_argument_group("keys of the scenario (weight_sync.*: see docs/config.md)")
    for name, info in known_keys().items():
        text = argparse.SUPPRESS if "." in name else f"{info.description} ({info.default})"
        options.add_argument(f"--{name}", dest=f"key:{name}", metavar="VALUE", help=text)
    return parser.parse_args(arguments)


def gather(options: argparse.Namespace) -> dict[str, Any]:
    """Return the given keys of the scenario: flags win over files over runs. Raises ConfigError or UserError."""
    given = vars(options)
    flags = {name: value_of_words([text]) for name in known_keys() if (text := given[f"key:{name}"]) is not None}
    values = {} if options.from_run is None else values_from_run(options.from_run, flags.get("ranks"))
    if options.scenario is not None:
        tables, problem = read_toml(options.scenario)
        if problem:
            raise ConfigError([f"scenario {options.scenario} {problem}"])
        for name, value in tables.items():
            values |= _flat(name, value)
    return values | flags


def _flat(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {key: inner for part, content in value.items() for key, inner in _flat(f"{name}.{part}", content).items()}


def main(arguments: list[str] | None = None) -> int:
    """Entry point; a mistake is reported in one message."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        values = gather(options)
        scenario = Scenario.of(values)
    except (ConfigError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    modes = {"async": [True], "blocking": [False], "both": [True, False]}[options.mode]
    results = [simulate(scenario, asynchronous) for asynchronous in modes]
    if options.json:
        figures = {result["mode"]: result for result in results}
        print(json.dumps({"scenario": asdict(scenario), "figures": figures}, sort_keys=True))
    else:
        print("".join(f"{name} = {show(value)}\n" for name, value in values.items()))
        print(comparison_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
