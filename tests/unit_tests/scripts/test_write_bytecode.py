"""scripts/write_bytecode.py, which compiles what a run imports of installed packages."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from scripts.write_bytecode import MODULES, InstalledPackages


def test_bytecode_of_packages_is_written_and_none_of_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = InstalledPackages()
    packages.folders = (str(tmp_path / "packages"),)
    set_data = lambda loader, path, data, **options: packages.set_data(loader, path, data, **options)  # noqa: E731
    monkeypatch.setattr(SourceFileLoader, "set_data", set_data)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    for folder in ("packages", "checkout"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"found_in_{folder}.py").write_text("VALUE = 1\n")
        monkeypatch.syspath_prepend(tmp_path / folder)
        importlib.import_module(f"found_in_{folder}")
        monkeypatch.delitem(sys.modules, f"found_in_{folder}")
    assert [path.parent.parent.name for path in tmp_path.rglob("*.pyc")] == ["packages"] and packages.count == 1
    assert {"torchtitan.trainer.job", "torchtitan.inference.engines.embedded.__main__"} <= set(MODULES)
