"""Processor seconds of the tests by folder, with imports and fixtures apart, and which fast tests take too many.

A test's seconds are those of its process and of all that it has started, whether that has ended or still runs. A
process whose parent ended before it is not counted.
"""

from __future__ import annotations

import importlib
import os
import resource
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import FAST, tier_of

# What a test without a mark may take beside imports and fixtures: above the first it is named, above the second a run
# with CI in its environment fails. The second is twice the first, since a full machine makes processors slower.
WARNING_S, LIMIT_S = 3.0, 6.0
PHASES = {"setup": "fixtures", "call": "tests", "teardown": "fixtures"}
COLUMNS = ("tests", "fixtures", "imports")
TICKS = os.sysconf("SC_CLK_TCK")
# What is used between tests and at their ends is looked up now: a test may have replaced it.
_list_folder, _own_number, _open = os.listdir, os.getpid, open


def _read(path: str) -> str:
    with _open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _children(pid: int) -> list[int]:
    """Processes that the threads of this one have started and that nobody has waited for yet."""
    found: list[int] = []
    try:
        for thread in _list_folder(f"/proc/{pid}/task"):
            found += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
    except OSError:
        # It has ended meanwhile, or this system has no such files.
        return found
    return found


def _running() -> float:
    """What descendants of this process that still run have taken, with what they have waited for."""
    total = 0.0
    waiting = _children(_own_number())
    while waiting:
        pid = waiting.pop()
        try:
            fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15])) / TICKS
        waiting += _children(pid)
    return total


def processor_seconds() -> float:
    """Of this process and of all that it has started."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(entry.ru_utime + entry.ru_stime for entry in usage) + _running()


class Imports:
    """Processor seconds in which the main thread imported modules."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def wrap(self, find_and_load: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
        """For importlib's function that imports what is not there yet, wherever an import is written."""

        def timed(name: str, import_: Any) -> Any:
            if threading.current_thread() is not threading.main_thread() or self._depth:
                return find_and_load(name, import_)
            self._depth = 1
            start = time.thread_time()
            try:
                return find_and_load(name, import_)
            finally:
                self._depth = 0
                self.seconds += time.thread_time() - start

        return timed


IMPORTS = Imports()


class Meter:
    """Measures the phases of every test where it runs; the reports carry it to where the summary is written."""

    def __init__(self, config: pytest.Config):
        self.config = config
        self._seconds = self._imports = 0.0

    def _since(self) -> tuple[float, float]:
        """(processor seconds but for imports, those of imports) since the last call."""
        seconds, imports = processor_seconds(), IMPORTS.seconds
        imported = imports - self._imports
        # What a process took that was left by its parent is no longer seen.
        rest = max(0.0, seconds - self._seconds - imported)
        self._seconds, self._imports = seconds, imports
        return rest, imported

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self._since()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        report.processor_s, report.import_s = self._since()  # type: ignore[attr-defined]
        report.tier = tier_of(item)  # type: ignore[attr-defined]
        return report

    def pytest_collection_finish(self) -> None:
        output = getattr(self.config, "workeroutput", None)
        if output is not None:
            output["collection_s"] = processor_seconds()


class Folders:
    """Adds up what the reports say, and tells it at the end."""

    def __init__(self) -> None:
        self.folders: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(("count", *COLUMNS), 0.0))
        # Test -> its processor seconds.
        self.long: dict[str, float] = {}
        self.collection_s = 0.0

    def pytest_collection_finish(self) -> None:
        self.collection_s += processor_seconds()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.collection_s += getattr(node, "workeroutput", {}).get("collection_s", 0.0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = getattr(report, "processor_s", 0.0)
        folder = Path(report.nodeid.partition("::")[0]).parent
        row = self.folders[str(folder.relative_to("tests") if folder.is_relative_to("tests") else folder)]
        row[PHASES[report.when or "call"]] += seconds
        row["imports"] += getattr(report, "import_s", 0.0)
        if report.when == "call":
            row["count"] += 1
            if getattr(report, "tier", "") == FAST and seconds > WARNING_S:
                self.long[report.nodeid] = seconds

    def figures(self) -> dict[str, Any]:
        """Processor seconds by folder, and of collecting the tests in all processes; tests that are too long."""
        rows = {folder: {key: round(value, 1) for key, value in row.items()} for folder, row in self.folders.items()}
        total = self.collection_s + sum(row[column] for row in self.folders.values() for column in COLUMNS)
        return {
            "processor_s": round(total, 1),
            "collection_s": round(self.collection_s, 1),
            "folders": dict(sorted(rows.items())),
            "too_long": {test: round(seconds, 1) for test, seconds in self.long.items()},
        }

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if "CI" in os.environ and any(seconds > LIMIT_S for seconds in self.long.values()):
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        figures = self.figures()
        terminalreporter.section("processor seconds")
        terminalreporter.line(f"{'folder':32}{'count':>8}" + "".join(f"{column:>10}" for column in COLUMNS))
        for folder, row in figures["folders"].items():
            cells = "".join(f"{row[column]:10.1f}" for column in COLUMNS)
            terminalreporter.line(f"{folder:32}{row['count']:8.0f}{cells}")
        terminalreporter.line(
            f"{figures['processor_s']:.0f} altogether, of which {figures['collection_s']:.0f} before the first test"
        )
        for test, seconds in figures["too_long"].items():
            terminalreporter.line(
                f"{test} took {seconds:.1f}: mark it slow, or make it take less than {WARNING_S:.0f}"
                + (f" (more than {LIMIT_S:.0f} fails in CI)" if seconds > LIMIT_S else ""),
                yellow=True,
            )


def pytest_configure(config: pytest.Config) -> None:
    # What both an import statement and importlib.import_module call for a module that is not there yet.
    bootstrap: Any = importlib._bootstrap  # type: ignore[attr-defined]
    if not hasattr(bootstrap, "_counted"):
        bootstrap._counted = True
        bootstrap._find_and_load = IMPORTS.wrap(bootstrap._find_and_load)
    config.pluginmanager.register(Meter(config), "processor_seconds_of_tests")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Folders(), "processor_seconds_of_folders")
