"""An hour of training in virtual time, on the real classes of the weight synchronisation.

    python -m simulator --ranks 64 --actors 32 --train_s 8
    python -m simulator scenario.toml --from-run outputs/latest

Every key of the scenario is a flag; --keys lists them. See docs/sync_simulator.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from simulator.figures import comparison_table, simulate
from simulator.measured import values_from_run
from simulator.scenario import Scenario, known_keys
from torchtitan.config.toml import read_toml, value_of_words
from torchtitan.errors import ConfigError, UserError


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options; keys of the scenario are left in `key:NAME`."""
    parser = argparse.ArgumentParser(prog="python -m simulator", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("scenario", nargs="?", help="TOML file with keys of the scenario")
    parser.add_argument("--from-run", type=Path, metavar="RUN_DIR", help="take what a run measured")
    parser.add_argument("--mode", choices=["both", "async", "blocking"], default="both")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--keys", action="store_true", help="print every key with its value and end")
    options = parser.add_argument_group("keys of the scenario (--keys says what they mean)")
    for name in known_keys():
        options.add_argument(f"--{name}", dest=f"key:{name}", metavar="VALUE", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def gather(options: argparse.Namespace) -> tuple[Scenario, dict[str, str]]:
    """The scenario, and for each key that was given where its value comes from. Flags win over files over runs.

    Raises ConfigError or UserError.
    """
    given = {name: vars(options)[f"key:{name}"] for name in known_keys()}
    flags = {name: value_of_words([text]) for name, text in given.items() if text is not None}
    sources = [("flag", flags)]
    if options.scenario is not None:
        tables, problem = read_toml(options.scenario)
        if problem:
            raise ConfigError([f"scenario {options.scenario} {problem}"])
        flat = {name: value for name, value in tables.items() if not isinstance(value, dict)}
        for table, inner in tables.items():
            flat |= {f"{table}.{key}": value for key, value in inner.items()} if isinstance(inner, dict) else {}
        sources.insert(0, (Path(options.scenario).name, flat))
    if options.from_run is not None:
        sources.insert(0, ("run", values_from_run(options.from_run, flags.get("ranks"))))
    values = {name: value for _, found in sources for name, value in found.items()}
    return Scenario.of(values), {name: source for source, found in sources for name in found}


def settings_table(scenario: Scenario, origins: dict[str, str]) -> str:
    """Every key with its value and where that comes from."""
    lines = ["key                          value        from       meaning"]
    for name, value in scenario.values().items():
        if name in origins or "." not in name:
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            meaning = "see docs/config.md" if "." in name else known_keys()[name].description
            lines.append(f"{name:28} {shown:12} {origins.get(name, 'default'):10} {meaning}")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Simulate, and print tables unless --json. Returns everything for JSON."""
    scenario, origins = gather(options)
    show = (lambda _text: None) if options.json else lambda text: print(text, end="\n\n", flush=True)
    if options.keys:
        print(settings_table(scenario, origins))
        return {}
    modes = {"async": [True], "blocking": [False], "both": [True, False]}[options.mode]
    show(settings_table(scenario, origins))
    results = [simulate(scenario, asynchronous) for asynchronous in modes]
    show(comparison_table(results))
    return {"scenario": scenario.values(), "figures": {result["mode"]: result for result in results}}


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
