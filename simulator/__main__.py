"""An hour of training in virtual time, on the real classes of the weight synchronisation.

    python -m simulator --ranks 64 --actors 32 --train_s 8
    python -m simulator scenario.toml --from-run outputs/latest

Every key of the scenario is a flag; --help lists them. See docs/sync_simulator.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from simulator.figures import comparison_table, simulate
from simulator.measured import values_from_run
from simulator.scenario import Scenario, known_keys
from torchtitan.config.values import read_toml, show, value_of_words
from torchtitan.errors import ConfigError, UserError


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options; keys of the scenario are left in `key:NAME`."""
    parser = argparse.ArgumentParser(prog="python -m simulator", description=__doc__.split("\n")[0], allow_abbrev=False)
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
    """The scenario's keys that were given. Flags win over files over runs. Raises ConfigError or UserError."""
    given = {name: vars(options)[f"key:{name}"] for name in known_keys()}
    flags = {name: value_of_words([text]) for name, text in given.items() if text is not None}
    values = {} if options.from_run is None else values_from_run(options.from_run, flags.get("ranks"))
    if options.scenario is not None:
        tables, problem = read_toml(options.scenario)
        if problem:
            raise ConfigError([f"scenario {options.scenario} {problem}"])
        for name, value in tables.items():
            values |= {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
    return values | flags


def main(arguments: list[str] | None = None) -> int:
    """Entry point; mistakes are one message."""
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
