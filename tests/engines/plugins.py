"""Plugins of the engines for tests: functions that an engine calls in each of its processes."""

from __future__ import annotations

from pathlib import Path

from tests.processes import ROOT


def install(folder: Path, group: str, function: str) -> str:
    """The PYTHONPATH with which an engine finds `module:function` under that group of entry points."""
    about = folder / "torchtitan_test_plugin-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torchtitan-test-plugin\nVersion: 0\n")
    (about / "entry_points.txt").write_text(f"[{group}]\nplugin = {function}\n")
    return f"{ROOT}:{folder}"
