"""The torch of GPU builds is one whose NCCL the engines have: pins.json records what the engines pin, and where
TORCHTITAN_ASK_INDEX is set, the package index is asked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.check_environment import read_requirements, version_numbers
from tests.unit_tests.scripts.test_gpu_environment import run, with_driver

ROOT = Path(__file__).resolve().parents[3]
NCCL = "nvidia-nccl-cu13"
PINS: dict[str, dict[str, str]] = json.loads((ROOT / "scripts/engines/pins.json").read_text())


def installed_engines() -> dict[str, str]:
    """Engine for GPUs -> its version in scripts/install_engine.sh."""
    text = (ROOT / "scripts/install_engine.sh").read_text()
    return dict(re.findall(r'^    \w+\) requirements=\("(vllm|sglang)==([\d.]+)"\)', text, re.MULTILINE))


def torch_of_gpu_builds() -> str:
    (version,) = re.findall(r"\|\| version=([\d.]+); fi", (ROOT / "scripts/setup_env.sh").read_text())
    return str(version)


def test_trainer_and_engines_have_one_nccl() -> None:
    engines = installed_engines()
    assert set(engines) == {"vllm", "sglang"}
    torches = {PINS[f"{name}=={version}"]["torch"] for name, version in engines.items()}
    own_torch = torch_of_gpu_builds()
    assert {PINS[f"torch=={version}"][NCCL] for version in torches} == {PINS[f"torch=={own_torch}"][NCCL]}
    # A colocated trainer has vLLM's torch.
    (allowed,) = [requirement for requirement in read_requirements([]) if requirement.startswith("torch>")]
    least, below = (version_numbers(bound) for bound in re.findall(r"[<>=]+([\d.]+)", allowed))
    assert all(least <= version_numbers(version) < below for version in (*torches, own_torch))


@pytest.mark.parametrize("pinned", sorted(PINS))
@pytest.mark.skipif("TORCHTITAN_ASK_INDEX" not in os.environ, reason="asks the package index: TORCHTITAN_ASK_INDEX=1")
def test_the_record_is_what_the_index_says(pinned: str) -> None:
    if pinned == "torch==2.13.0":
        pytest.skip("a CPU build may stand in its place here")
    words = ["install", "-q", "--dry-run", "--ignore-installed", "--no-deps", "--report", "-", pinned]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words], capture_output=True, text=True, timeout=300, check=True
    )
    requires = json.loads(done.stdout)["install"][0]["metadata"]["requires_dist"]
    for name, version in PINS[pinned].items():
        assert any(re.match(rf"{name}=={re.escape(version)}(;|$)", row.replace(" ", "")) for row in requires), requires


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_old_driver_is_refused_before_anything_is_installed(engine: str, tmp_path: Path) -> None:
    environment = with_driver(tmp_path, "570.86.15") | {"TORCHTITAN_ENGINES": str(tmp_path / "engines")}
    refused = run([ROOT / "scripts/install_engine.sh", engine], environment)
    assert refused.returncode == 1 and "driver of 580 or newer" in refused.stderr and "570.86.15" in refused.stderr
    assert not (tmp_path / "engines").exists()
