"""What a wheel holds, and what an installed package says beside its namesake."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.patience import PATIENCE_S
from torchtitan.models.shape.exports import SHIPPED, SHIPPED_FOLDER

ROOT = Path(__file__).resolve().parents[3]


def copy_checkout(folder: Path) -> Path:
    """What a build reads, copied into this folder: a build leaves folders behind."""
    checkout = folder / "checkout"
    shutil.copytree(
        ROOT / "torchtitan", checkout / "torchtitan", symlinks=True, ignore=shutil.ignore_patterns("__py*__")
    )
    shutil.copytree(ROOT / "train_configs", checkout / "train_configs")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    return checkout


def build_wheel(folder: Path) -> Path:
    """The package's wheel, in this folder."""
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    build = [sys.executable, "-c", code]
    subprocess.run(build, cwd=copy_checkout(folder), capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    (wheel,) = folder.glob("torchtitan_grpo-*.whl")
    return wheel


def test_a_wheel_holds_every_module_and_every_shipped_configuration(tmp_path: Path) -> None:
    with ZipFile(build_wheel(tmp_path)) as file:
        packed = {name for name in file.namelist() if ".dist-info/" not in name}
        (scripts,) = (file.read(name).decode() for name in file.namelist() if name.endswith("entry_points.txt"))
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "torchtitan").rglob("*.py")}
    # Those that name modules of examples/ run from a checkout alone.
    usable = [path for path in (ROOT / "train_configs").glob("*.toml") if "examples." not in path.read_text()]
    configs = {f"torchtitan/train_configs/{path.name}" for path in usable}
    assert "torchtitan/train_configs/debug_cpu.toml" in configs
    page = {f"torchtitan/report/{name}" for name in ("page.html", "page.css", "charts.js", "completions.js", "page.js")}
    engines = {path.relative_to(ROOT).as_posix() for path in (ROOT / "torchtitan").rglob("engine.toml")}
    assets = {path.relative_to(ROOT).as_posix() for path in SHIPPED_FOLDER.rglob("*") if path.is_file()}
    assert {f"torchtitan/assets/{name}/model.safetensors" for name in SHIPPED} <= assets
    assert len(engines) >= 4 and packed == modules | configs | page | engines | assets
    assert "torchtitan-grpo = torchtitan.grpo_train:entry_point" in scripts


@pytest.mark.exhaustive
def test_a_release_is_built_by_way_of_its_sources_and_twine_finds_no_fault_with_it(tmp_path: Path) -> None:
    for tool in ("build", "twine"):
        pytest.importorskip(tool, reason=f"{tool} is not installed: pip install -e .[dev]")

    def run(*words: str | Path) -> str:
        command = [sys.executable, "-m", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    direct = build_wheel(tmp_path)
    # Makes the archive of sources, and the wheel from that; what they need is in this environment.
    run("build", "--no-isolation", "--outdir", tmp_path / "dist", tmp_path / "checkout")
    files = sorted((tmp_path / "dist").iterdir())
    assert [file.suffix for file in files] == [".whl", ".gz"]
    assert run("twine", "check", "--strict", *files).count("PASSED") == 2
    with ZipFile(direct) as expected, ZipFile(files[0]) as found:
        assert sorted(found.namelist()) == sorted(expected.namelist())


@pytest.mark.parametrize("module", ["grpo_train", "preflight", "report", "utils.launch"])
def test_a_namesake_that_was_installed_later_is_named(tmp_path: Path, module: str) -> None:
    installed = tmp_path / "torchtitan"
    ignored = shutil.ignore_patterns("__py*__", "train_configs")
    shutil.copytree(ROOT / "torchtitan", installed, ignore=ignored)
    # What PyPI's 0.3.0 puts in the place of our files.
    (installed / "__init__.py").write_text('__version__ = "0.3.0"\n')
    (installed / "config" / "__init__.py").write_text("import tyro_that_is_not_there\n")
    done = subprocess.run(
        [sys.executable, "-m", f"torchtitan.{module}"], cwd=tmp_path, capture_output=True, text=True,
        env={"PYTHONPATH": str(tmp_path)}, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert f"{installed}/__init__.py belongs to another package" in done.stderr and "uninstall" in done.stderr


def test_the_script_sees_another_package_in_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "torchtitan").mkdir()
    (tmp_path / "torchtitan" / "__init__.py").write_text("raise SystemExit('nobody may import this')")
    command, environment = [str(ROOT / "run_grpo.sh"), "--dry-run"], {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 2
    assert f"torchtitan is another package ({tmp_path}/torchtitan/__init__.py)" in done.stderr.splitlines()[-1]


def test_beside_its_namesake_the_import_says_so(tmp_path: Path) -> None:
    def importing() -> subprocess.CompletedProcess[str]:
        environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
        command = [sys.executable, "-c", "import torchtitan; print(torchtitan.__version__)"]
        return subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    (tmp_path / "torchtitan_grpo-0.1.0.dist-info").mkdir()
    assert importing().returncode == 0
    (tmp_path / "torchtitan-0.2.0.dist-info").mkdir()
    failed = importing()
    assert failed.returncode == 1
    last = failed.stderr.rstrip().splitlines()[-1]
    assert last.startswith("ImportError: torchtitan-grpo cannot run beside another package") and "uninstall" in last
    assert f"{tmp_path}/torchtitan-0.2.0.dist-info" in last
