"""Folders in which agents write versions for their engines."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan.inference.agent.applier import FileLoader, remove_abandoned
from torchtitan.inference.agent.engine import EngineOptions


@pytest.fixture(scope="module")
def dead_process() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def loader(folder: Path) -> FileLoader:
    options = EngineOptions("actor-0", "model", "", "agent", Path(), "", 0, disk_path=str(folder))
    return FileLoader(options, lambda folder, label: None)


def test_only_what_a_dead_agent_of_this_machine_left_is_removed(tmp_path: Path, dead_process: int) -> None:
    here = socket.gethostname()
    for name, owner in {
        "abandoned": f"{dead_process} {here}",
        "of-another-machine": f"{dead_process} not-{here}",
        "alive": f"{os.getpid()} {here}",
        # An agent that starts right now, and one of an earlier version.
        "unfinished": "",
        "earlier": str(dead_process),
    }.items():
        (tmp_path / f"torchtitan-{name}-x").mkdir()
        (tmp_path / f"torchtitan-{name}-x" / "owner").write_text(owner)
    (tmp_path / "torchtitan-without-owner").mkdir()
    remove_abandoned(tmp_path)
    left = sorted(folder.name.removeprefix("torchtitan-").removesuffix("-x") for folder in tmp_path.iterdir())
    assert left == ["alive", "earlier", "of-another-machine", "unfinished", "without-owner"]


def test_an_agent_keeps_others_folders_and_removes_its_own(tmp_path: Path, dead_process: int) -> None:
    first = loader(tmp_path)
    (folder,) = tmp_path.iterdir()
    second = loader(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    (folder / "owner").write_text(f"{dead_process} {socket.gethostname()}")
    third = loader(tmp_path)
    assert not folder.exists() and len(list(tmp_path.iterdir())) == 2
    for agent in (first, second, third):
        agent.close()
    assert not list(tmp_path.iterdir())
