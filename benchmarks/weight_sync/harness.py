"""What every scenario has: a command line, a folder, things to close at the end, conditions and a report."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import common

SCENARIOS = Path(__file__).parent / "scenarios"


@dataclass(frozen=True)
class Option:
    """An option of a scenario's command line. Its name is a key of the scenario's OPTIONS."""

    default: Any
    help: str = ""
    quick: Any = None
    """With --quick; None: the default"""
    choices: Sequence[str] | None = None
    count: int | None = None
    """How many words it takes, if not one"""
    type: type | None = None
    """If not that of the default"""


@dataclass
class Run:
    """One call of a scenario."""

    options: argparse.Namespace
    folder: Path
    """Empty at the beginning"""
    closing: contextlib.ExitStack
    """What is closed when the scenario ends, however it does"""
    bars: common.Bars
    """The scenario's, unless it sets others"""
    conditions: dict[str, Any] = field(default_factory=dict)
    """What the report says beside the options"""

    @property
    def quick(self) -> bool:
        """Whether it only has to show that it works."""
        return bool(self.options.quick)


def descriptions() -> dict[str, str]:
    """Scenario -> the first line of its docstring. Imports none of them, since that takes seconds."""
    found = {}
    for file in sorted(SCENARIOS.glob("*.py")):
        docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
        if docstring is not None:
            found[file.stem] = docstring.splitlines()[0]
    return found


def parse_options(
    name: str, docstring: str | None, options: Mapping[str, Option], words: list[str]
) -> argparse.Namespace:
    """The options of a scenario, with the values of --quick in the place of the defaults where it is given."""
    parser = common.parser(docstring)
    parser.prog = f"python -m benchmarks.weight_sync {name}"
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave logs and journals in this empty folder")
    for key, option in options.items():
        parser.add_argument(
            f"--{key}",
            default=option.default,
            type=option.type or type(option.default),
            choices=option.choices,
            nargs=option.count,
            help=option.help,
        )
    quick = {key: option.quick for key, option in options.items() if option.quick is not None}
    if parser.parse_known_args(words)[0].quick:
        parser.set_defaults(**quick)
    return parser.parse_args(words)


def main(words: list[str]) -> None:
    """The command: a scenario and its options."""
    known = descriptions()
    if not words or words[0] not in known:
        print("\n".join(f"{name:10} {description}" for name, description in known.items()))
        asked_for_help = not words or words[0] in ("-h", "--help")
        sys.exit(0 if asked_for_help else f"error: no scenario is called {words[0]!r}; above are those that there are")
    name = words[0]
    scenario = importlib.import_module(f"benchmarks.weight_sync.scenarios.{name}")
    options = parse_options(name, scenario.__doc__, scenario.OPTIONS, words[1:])
    # A scenario that is asked to end closes what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with contextlib.ExitStack() as closing:
        temporary = closing.enter_context(tempfile.TemporaryDirectory(prefix=f"weight-sync-{name}-"))
        folder = Path(options.keep or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        run = Run(options, folder, closing, scenario.BARS)
        figures = scenario.measure(run)
    import torch

    chosen = {key: value for key, value in vars(options).items() if key not in ("json", "keep")}
    machine = {
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "processor": common.processor(),
        "torch": torch.__version__,
    }
    common.report(f"weight_sync_{name}", figures, run.bars, {**chosen, **run.conditions, **machine}, options.json)
