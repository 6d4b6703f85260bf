"""An hour of training in virtual time, on the real state machines of the weight synchronisation.

    python -m simulator --ranks 64 --actors 32 --train_s 8
    python -m simulator scenario.toml --from-run outputs/latest --gpus 128

Every key of the scenario is a flag; --keys lists them. See docs/sync_simulator.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from simulator.figures import simulate
from simulator.measured import values_from_run
from simulator.report import comparison_table, settings_table, split_table
from simulator.scenario import Scenario, key_types, read_scenario
from simulator.split import best_split
from torchtitan.errors import ConfigError, UserError


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options; keys of the scenario are left in `keys`."""
    parser = argparse.ArgumentParser(prog="python -m simulator", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("scenario", nargs="?", type=Path, help="TOML or JSON file with keys of the scenario")
    parser.add_argument("--from-run", type=Path, metavar="RUN_DIR", help="take what a run measured")
    parser.add_argument("--gpus", type=int, help="look for the best split of so many GPUs")
    parser.add_argument("--mode", choices=["both", "async", "blocking"], default="both")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--keys", action="store_true", help="print every key with its value and end")
    options = parser.add_argument_group("keys of the scenario (--keys says what they mean)")
    for name in key_types():
        options.add_argument(f"--{name}", dest=f"key:{name}", metavar="VALUE", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def gather(options: argparse.Namespace) -> tuple[Scenario, dict[str, str]]:
    """The scenario, and for each key that was given where its value comes from. Flags win over files over runs.

    Raises ConfigError or UserError.
    """
    flags = {name: _value(name, text) for name in key_types() if (text := vars(options)[f"key:{name}"]) is not None}
    sources: list[tuple[str, dict[str, Any]]] = []
    if options.from_run is not None:
        sources.append(("run", values_from_run(options.from_run, flags.get("ranks"))))
    if options.scenario is not None:
        sources.append((options.scenario.name, read_scenario(options.scenario)))
    sources.append(("flag", flags))
    values = {name: value for _, found in sources for name, value in found.items()}
    origins = {name: source for source, found in sources for name in found}
    return Scenario().with_values(values), origins


def _value(name: str, text: str) -> Any:
    kind = key_types()[name]
    if kind is bool:
        return {"true": True, "false": False}.get(text, text)
    try:
        return kind(text) if kind in (int, float) else text
    except ValueError:
        return text  # refused with the key's name later


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Simulate, and print tables unless --json. Returns everything for JSON."""
    scenario, origins = gather(options)
    if options.keys:
        print(settings_table(scenario, origins))
        return {}
    modes = {"async": [True], "blocking": [False], "both": [True, False]}[options.mode]
    if not options.json:
        print(settings_table(scenario, origins), end="\n\n", flush=True)
    answer: dict[str, Any] = {"scenario": scenario.values()}
    if options.gpus is not None:
        splits = best_split(scenario, options.gpus, modes[0])
        answer["gpus"] = options.gpus
        answer["splits"] = [{"ranks": s.ranks, "actors": s.actors, **s.figures.to_json()} for s in splits]
        if not options.json:
            print(split_table(options.gpus, splits), end="\n\n", flush=True)
        scenario = scenario.split(splits[0].ranks, splits[0].actors)
    results = [simulate(scenario, asynchronous) for asynchronous in modes]
    answer["figures"] = {result.mode: result.to_json() for result in results}
    if not options.json:
        print(comparison_table(results))
    return answer


def main(arguments: list[str] | None = None) -> int:
    """Entry point; mistakes are one message."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        answer = run(options)
    except (ConfigError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if options.json and answer:
        print(json.dumps(answer, sort_keys=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
