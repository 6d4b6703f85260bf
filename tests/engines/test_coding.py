"""examples/coding: a coding agent from PyPI, unmodified, repairs generated bugs in a sandbox."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from examples.coding import sandbox, tasks
from tests.processes import ROOT

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
SECONDS = 400


def test_its_tokens_are_recorded_and_nothing_is_lost_where_faults_strike(mini_swe_agent_python: Path) -> None:
    """Two episodes, of which one has a command that hangs and one leaves a process; an agent and an actor are killed.
    By hand, benchmarks/coding_agent.py plays fifty."""
    command = [sys.executable, str(ROOT / "benchmarks" / "coding_agent.py"), "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report["figures"].values()) == {0.0}, report
    conditions = report["conditions"]
    assert (conditions["agents killed"], conditions["actors killed"]) == (1, 1)
    assert conditions["episodes played again"] >= 1 and conditions["turns"] >= 8


def test_bugs_are_found_by_hidden_tests_alone(mini_swe_agent_python: Path) -> None:
    """Every row is a bug that its issue describes; one of each package fails as it is and passes when it is repaired,
    whatever else its repository holds."""
    rows = tasks.rows()
    assert len(rows) == 60 and len({json.dumps(row) for row in rows}) == 60

    def solved(package: str, files: dict[str, str]) -> bool:
        return asyncio.run(tasks.solved(package, files, mini_swe_agent_python))

    for package in tasks.PACKAGES:
        bugs = [row for row in rows if row["package"] == package]
        files = {tasks.repository(row)[f"{package}/__init__.py"] for row in bugs}
        assert len(bugs) == len(files) == 20
        path = f"{package}/__init__.py"
        broken = tasks.repository(bugs[0])
        assert not solved(package, {**broken, "conftest.py": "import os; os._exit(0)"})
        assert not solved(package, {path: "import os; os._exit(0)"})
        assert solved(package, {**broken, path: tasks.code_of(package).read_text()})


def test_the_sandbox_shows_nothing_of_the_machine(
    mini_swe_agent_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hidden")
    script = (
        "import os, socket\n"
        f"print(os.path.exists({str(ROOT)!r}), os.path.exists({str(tmp_path)!r}), os.environ.get('SECRET'))\n"
        "print(len([name for name in os.listdir('/proc') if name.isdigit()]) < 6, socket.if_nameindex())\n"
        "open('left.txt', 'w').write('here')\n"
    )
    command = ["bash", "-c", "python show.py > said.txt"]
    done = asyncio.run(sandbox.run(mini_swe_agent_python, {"show.py": script}, command, "*.txt"))
    assert done.code == 0 and done.files["left.txt"] == "here"
    assert done.files["said.txt"] == "False False None\nTrue [(1, 'lo')]\n"
