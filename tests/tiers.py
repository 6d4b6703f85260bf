"""Which tests run when, and what the end of a run says did not run. The tiers, each with the option that chooses it:

- `--fast`: tests of tests/unit_tests without a mark.
- without an option: these, tests that are marked `slow`, and those of other folders.
- `--engines`: only tests that are marked `engine`, as are all of tests/engines.
- `--all`: all of these, and tests that are marked `exhaustive`.
- `--benchmarks`: adds tests that are marked `benchmark` to any of these.

A file that is named runs whole, but for its benchmarks, and a test that is named (file::test) always runs. With
`--fast`, both keep to their tier.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
ENGINES_FOLDER, UNIT_FOLDER = ROOT / "tests" / "engines", ROOT / "tests" / "unit_tests"

FAST, DEFAULT, ENGINES, ALL, BENCHMARKS = "fast", "default", "engines", "all", "benchmarks"
# Tiers that an option adds.
RUN_WITH = {ENGINES: "--engines", ALL: "--all", BENCHMARKS: "--benchmarks"}


def tier_of(item: pytest.Item) -> str:
    """The tier in which a test runs first."""
    marks = {mark.name for mark in item.iter_markers()}
    for mark, tier in (("benchmark", BENCHMARKS), ("exhaustive", ALL), ("engine", ENGINES), ("slow", DEFAULT)):
        if mark in marks:
            return tier
    return FAST if UNIT_FOLDER in item.path.parents else DEFAULT


def chosen_tiers(config: pytest.Config) -> set[str]:
    """The tiers that the options of this run choose."""
    if config.getoption("--fast"):
        tiers = {FAST}
    elif config.getoption("--engines"):
        tiers = {ENGINES}
    elif config.getoption("--all"):
        tiers = {FAST, DEFAULT, ENGINES, ALL}
    else:
        tiers = {FAST, DEFAULT}
    if config.getoption("--benchmarks"):
        tiers.add(BENCHMARKS)
    return tiers


class Tiers:
    """Selects the tests of a run, and tells at its end what was left out. With xdist, every worker collects the same
    tests, and tells the process that writes the summary."""

    def __init__(self, config: pytest.Config):
        self.config = config
        self.tiers = chosen_tiers(config)
        self.named = set()
        self.files = set()
        for argument in [] if config.getoption("--fast") else config.args:
            path, _, test = argument.partition("::")
            file = (config.invocation_params.dir / path).resolve()
            if test:
                self.named.add(file)
            elif file.is_file():
                self.files.add(file)
        # Tier -> how many of its tests were collected and left out.
        self.left_out: Counter[str] = Counter()
        self.engines: dict[str, Counter[str]] = {}
        self.skipped: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()

    def wanted(self, item: pytest.Item) -> bool:
        tier = tier_of(item)
        if tier in self.tiers or item.path in self.named:
            return True
        return item.path in self.files and tier != BENCHMARKS

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        unwanted = [item for item in items if not self.wanted(item)]
        config.hook.pytest_deselected(items=unwanted)
        self.left_out = Counter(tier_of(item) for item in unwanted)
        items[:] = [item for item in items if self.wanted(item)]

    def pytest_sessionfinish(self) -> None:
        output = getattr(self.config, "workeroutput", None)
        if output is not None:
            output["left_out"] = dict(self.left_out)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.left_out = Counter(getattr(node, "workeroutput", {}).get("left_out", self.left_out))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        outcome = "error" if report.failed and report.when != "call" else report.outcome
        self.outcomes[outcome] += 1
        for name, engine in report.user_properties:
            if name == "engine":
                self.engines.setdefault(str(engine), Counter())[outcome] += 1
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def not_run(self) -> dict[str, int]:
        """What a person may pass, or leave out -> how many more tests would have run."""
        chosen = "--fast" if self.config.getoption("--fast") else "--engines"
        counts: Counter[str] = Counter()
        for tier, count in self.left_out.items():
            counts[RUN_WITH.get(tier, f"without {chosen}")] += count
        return dict(counts)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.engines:
            terminalreporter.section("engines")
        for engine, outcomes in sorted(self.engines.items()):
            counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
            ran = "exercised" if set(outcomes) != {"skipped"} else "NOT EXERCISED"
            terminalreporter.line(f"{engine}: {ran} ({counts})")
        if self.left_out or self.skipped:
            terminalreporter.section("not run")
        for option, count in sorted(self.not_run().items()):
            terminalreporter.line(f"{count} tests, which run {option if ' ' in option else f'with {option}'}")
        for reason, count in sorted(self.skipped.items()):
            terminalreporter.line(f"{count} skipped: {reason}")


class Summary:
    """Writes the run's figures to a file as one JSON object, for `.ci/run`."""

    def __init__(self, tiers: Tiers):
        self.tiers = tiers

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        file = session.config.getoption("--summary")
        if file is None or hasattr(session.config, "workeroutput"):
            return
        meter = session.config.pluginmanager.get_plugin("processor_seconds_of_folders")
        summary = {
            "exit_code": int(session.exitstatus),
            "outcomes": dict(self.tiers.outcomes),
            "not_run": self.tiers.not_run(),
            "skipped": dict(self.tiers.skipped),
            "engines": {engine: dict(outcomes) for engine, outcomes in self.tiers.engines.items()},
            **(meter.figures() if meter is not None else {}),
        }
        Path(file).write_text(json.dumps(summary) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--fast", action="store_true", help="only the unit tests that have no mark of a later tier")
    group.addoption("--engines", action="store_true", help="only the tests that start vLLM, SGLang or an agent")
    group.addoption("--all", action="store_true", help="all tests but the benchmarks")
    group.addoption("--benchmarks", action="store_true", help="run every benchmark in little, too")
    group.addoption("--summary", metavar="FILE", help="write what the end says to this file, as one JSON object")


def pytest_configure(config: pytest.Config) -> None:
    options = [name for name in ("--fast", "--engines", "--all") if config.getoption(name)]
    if len(options) > 1:
        raise pytest.UsageError(f"{' and '.join(options)} choose different tests: pass one of them")
    tiers = Tiers(config)
    config.pluginmanager.register(tiers, "tiers_of_this_run")
    config.pluginmanager.register(Summary(tiers), "summary_of_this_run")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if ENGINES_FOLDER in item.path.parents:
            item.add_marker("engine")
