"""Plugins of the engines for tests: functions that an engine calls in each of its processes."""

from __future__ import annotations

from pathlib import Path


def install(folder: Path, group: str, function: str) -> Path:
    """Have an engine find `module:function` under that group of entry points where the folder is on the path."""
    about = folder / "torchtitan_test_plugin-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torchtitan-test-plugin\nVersion: 0\n")
    (about / "entry_points.txt").write_text(f"[{group}]\nplugin = {function}\n")
    return folder
