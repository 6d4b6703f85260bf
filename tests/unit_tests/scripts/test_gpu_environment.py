"""A machine with an NVIDIA GPU and a torch that cannot use it: said at once, by the set-up and by a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
SMI = """#!/bin/sh
case "$*" in
    -L) echo "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)" ;;
    *driver_version*) echo "{driver}" ;;
esac
"""
cpu_build = pytest.mark.skipif(torch.version.cuda is not None, reason="needs a CPU build of torch")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables under which a driver of version 580 lists one GPU."""
    return with_driver(tmp_path, "580.65.06")


def with_driver(folder: Path, driver: str) -> dict[str, str]:
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "nvidia-smi").write_text(SMI.replace("{driver}", driver))
    (programs / "nvidia-smi").chmod(0o755)
    left_out = ("CUDA_VISIBLE_DEVICES", "TORCHTITAN_DEVICE", "TORCH_BACKEND", "TORCH_VERSION")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def run(command: list[object], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=120, env=environment, check=False
    )


@pytest.mark.slow
@cpu_build
def test_a_run_does_not_take_the_cpu_for_want_of_a_cuda_build(environment: dict[str, str]) -> None:
    code = (
        "import sys\nfrom torchtitan.distributed import device\nfrom torchtitan.errors import UserError\n"
        "try:\n    print(device.device())\nexcept UserError as error:\n    print(error); sys.exit(error.exit_code)"
    )
    refused = run([sys.executable, "-c", code], environment)
    assert refused.returncode == 2
    assert "this machine shows an NVIDIA GPU" in refused.stdout and "is a CPU build" in refused.stdout
    assert "TORCH_BACKEND=auto scripts/setup_env.sh" in refused.stdout and "TORCHTITAN_DEVICE=cpu" in refused.stdout
    wanted = run([sys.executable, "-c", code], environment | {"TORCHTITAN_DEVICE": "cpu"})
    hidden = run([sys.executable, "-c", code], environment | {"CUDA_VISIBLE_DEVICES": ""})
    assert wanted.stdout.strip() == hidden.stdout.strip() == "cpu"


@cpu_build
def test_the_set_up_does_not_take_a_cpu_build_for_good_on_a_gpu_machine(environment: dict[str, str]) -> None:
    look: list[object] = [sys.executable, ROOT / "scripts/check_environment.py", "--only", "torch"]
    lacking = run(look, environment)
    assert lacking.returncode == 1 and "is a CPU build, and this machine has an NVIDIA GPU" in lacking.stdout
    assert run(look, environment | {"TORCH_BACKEND": "cpu"}).returncode == 0
    assert run(look, environment | {"TORCHTITAN_DEVICE": "cpu"}).returncode == 0


@pytest.mark.parametrize(
    ("driver", "backend", "installed"),
    [
        ("580.65.06", "", "pip install -qq --no-compile torch==2.14.0"),
        ("550.54.15", "", "uv pip install --quiet --python PYTHON --torch-backend=auto REPLACE torch==2.11.0"),
        ("580.65.06", "cu130", "uv pip install --quiet --python PYTHON --torch-backend=cu130 REPLACE torch==2.14.0"),
        ("580.65.06", "cpu", "pip install -qq --no-compile torch==2.13.0+cpu"),
    ],
)
def test_the_build_of_torch_follows_the_driver_or_the_wish(
    driver: str, backend: str, installed: str, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    for name, words in (("python", 'shift; echo "$@" >> "$CALLS"'), ("uv", 'echo uv "$@" >> "$CALLS"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{words}\n")
        (tmp_path / name).chmod(0o755)
    environment = with_driver(tmp_path, driver) | {"CALLS": str(tmp_path / "calls"), "PYTHON": str(python)}
    if backend:
        environment["TORCH_BACKEND"] = backend
    done = run(["bash", "-c", f'source {ROOT}/scripts/setup_env.sh; setup_install_torch "$PYTHON"'], environment)
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert "uninstall" not in str(calls)  # what is there goes when its successor has come
    assert calls[-1] == installed.replace("PYTHON", str(python)).replace("REPLACE", "--reinstall-package torch")
    # Else pip would keep a CPU build of the same version.
    assert backend or driver < "58" or "--force-reinstall --no-deps" in calls[0]
