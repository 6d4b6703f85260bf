"""The flow of scripts/verify_gpu.sh, with a driver that is a script and checks that are stand-ins."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.verify_gpu import checked_code, read_checks
from tests.patience import PATIENCE_S, until
from tests.processes import has_ended
from torchtitan.config.job_config import JobConfig, config_to_toml
from torchtitan.config.reading import read_command_line
from torchtitan.models.shape.checkpoint_shape import read_shape
from torchtitan.preflight.plan import describe_plan
from torchtitan.preflight.validate import validated

ROOT = Path(__file__).resolve().parents[3]
CHECKS = """
[[check]]
name = "first"
shows = "that it runs"
command = "echo ran >> first; echo '3 passed in 1 s'"
must_say = "(\\\\d+ passed).*"
[[check]]
name = "bars"
shows = "a benchmark"
command = "printf 'gain   1.5   >= 2  MISSED\\\\nloss   0.1   <= 0.2  met\\\\n'"
must_say = "loss"
[[check]]
name = "hangs"
shows = "a deadline"
command = "sleep 600 & echo $! > sleeper; wait"
must_say = "never"
minutes = 0.02
[[check]]
name = "silent"
shows = "that silence is no success"
command = "true"
must_say = "done"
[[check]]
name = "breaks"
shows = "an exit code"
command = "echo done; exit 3"
must_say = "done"
[[check]]
name = "many"
shows = "eight GPUs"
command = "echo ran >> many"
must_say = ""
gpus = 8
"""


def verify(folder: Path, *words: str, gpus: int = 2) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    program = programs / "nvidia-smi"
    rows = "\\n".join(["NVIDIA H100, 580.1, 81559 MiB"] * gpus)
    program.write_text(f"#!/bin/sh\nprintf '{rows}\\n'\n")
    program.chmod(0o755)
    (folder / "checks.toml").write_text(
        CHECKS.replace(">> ", f">> {folder}/").replace("> sleeper", f"> {folder}/sleeper")
    )
    options = ["--checks", folder / "checks.toml", "--folder", folder, *words]
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/verify_gpu.py", *options],
        capture_output=True, text=True, timeout=PATIENCE_S * 4, check=False,
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
    )  # fmt: skip
    return done, json.loads((folder / "results.json").read_text())


def test_checks_run_in_order_and_only_what_failed_runs_again(tmp_path: Path) -> None:
    done, written = verify(tmp_path)
    assert done.returncode == 1, done.stderr
    statuses = {result["name"]: result["status"] for result in written["results"]}
    assert list(statuses.items()) == [
        ("first", "passed"), ("bars", "failed"), ("hangs", "late"), ("silent", "failed"), ("breaks", "failed"),
        ("many", "left out"),
    ]  # fmt: skip
    measured = {result["name"]: result["measured"] for result in written["results"]}
    assert measured["first"] == "3 passed" and "exit code 3" in measured["breaks"]
    assert measured["silent"] == "not said: done" and measured["many"] == "needs 8 GPUs"
    (figures,) = [result["figures"] for result in written["results"] if result["name"] == "bars"]
    assert [(bar["key"], bar["measured"], bar["met"]) for bar in figures] == [("gain", 1.5, False), ("loss", 0.1, True)]
    assert written["machine"]["gpus"] == ["NVIDIA H100, 580.1, 81559 MiB"] * 2
    assert "gain" in done.stdout and "MISSED" in done.stdout and "late     hangs" in done.stdout
    # Nothing of a check that was late is left.
    sleeper = int((tmp_path / "sleeper").read_text())
    # Killed; who takes the place of its parent may not have asked for its exit code yet.
    until(lambda: has_ended(sleeper))

    verify(tmp_path, "--only", "first", "silent")
    assert (tmp_path / "first").read_text() == "ran\n"
    done, _ = verify(tmp_path, "--only", "first", "--again")
    assert done.returncode == 0 and (tmp_path / "first").read_text() == "ran\nran\n"
    # On another machine everything counts anew.
    _, written = verify(tmp_path, "--only", "first", "many", gpus=8)
    assert (tmp_path / "many").read_text() == "ran\n" and (tmp_path / "first").read_text().count("ran") == 3


def test_what_has_passed_counts_for_the_very_code_that_ran(tmp_path: Path) -> None:
    """Who mends something on the machine has not committed it yet."""
    assert checked_code(tmp_path) == ""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com"]
    (tmp_path / "code.py").write_text("1")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    clean, known = checked_code(tmp_path), set[str]()
    for text in ("2", "3"):
        (tmp_path / "code.py").write_text(text)
        known.add(checked_code(tmp_path))
    (tmp_path / "code.py").write_text("1")
    assert checked_code(tmp_path) == clean and len(known) == 2
    assert all(code.startswith(f"{clean}-") for code in known)


@pytest.mark.parametrize("name", ["verify_gpu", "verify_gpu_quick"])
def test_what_the_shipped_checks_run_is_there(name: str) -> None:
    checks = read_checks(ROOT / f"scripts/{name}.toml")
    assert len({check.name for check in checks}) == len(checks) > 5
    for check in checks:
        words = [
            word for word in shlex.split(check.command) if word.startswith(("benchmarks/", "scripts/", "./", "tests/"))
        ]
        assert all((ROOT / word).exists() for word in words), check.name


@pytest.mark.parametrize("driver", ["exit 9", "echo 'No devices were found'"])
def test_without_a_gpu_there_is_nothing_to_verify(tmp_path: Path, driver: str) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{driver}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    done = subprocess.run(
        [ROOT / "scripts/verify_gpu.sh"], capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 2 and "lists no GPU" in done.stderr


def test_the_settings_of_the_quick_checks_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHTITAN_DEVICE", "cuda")
    monkeypatch.chdir(ROOT)
    runs = 0
    for check in read_checks(ROOT / "scripts/verify_gpu_quick.toml"):
        for run in re.findall(r"CONFIG_FILE=(\S+) (?:NGPU=1 )?\./run_grpo\.sh ((?:.*\\\n)*.*)", check.command):
            words = shlex.split(run[1].replace("\\\n", " ").removesuffix("&&").replace("$MODEL", "debug_random"))
            validated(read_command_line(["--job.config_file", run[0], *words])[0], planning=True)
            runs += 1
    assert runs == 8


@pytest.mark.parametrize(
    ("memory", "options", "left_out"),
    [
        (81559, [], {"nccl_two_gpus": "left out"}),
        (24564, [], {"nccl_two_gpus": "left out"}),
        (15360, [], {"nccl_two_gpus": "left out", "train_0.6b": "too small"}),
        (
            24564,
            ["--no-engines"],
            dict.fromkeys(
                (
                    "vllm_graphs_digest",
                    "vllm_sleep1_tcp",
                    "vllm_sleep2_ipc",
                    "vllm_sleep2_tcp",
                    "vllm_sleep1_ipc",
                    "colocated_sleep2",
                ),
                "not run",
            )
            | {"nccl_two_gpus": "left out"},
        ),
    ],
)
def test_the_whole_quick_script_runs_against_fakes(
    memory: int, options: list[str], left_out: dict[str, str], tmp_path: Path
) -> None:
    """The shipped list and scripts; run, engine, driver and interpreter are stand-ins, of which one fails."""
    root, programs = tmp_path / "checkout", tmp_path / "bin"
    for folder in (root / "scripts", root / "benchmarks", programs):
        folder.mkdir(parents=True)
    for name in ("verify_gpu.sh", "verify_gpu.py", "verify_gpu_quick.toml"):
        shutil.copy(ROOT / "scripts" / name, root / "scripts")
    python = f"""
case "$*" in
    *verify_gpu.py*) exec {sys.executable} "$@" ;;
    *pytest*integration*) echo "1 failed in 2 s"; exit 1 ;;
    *pytest*) echo "7 passed in 2 s" ;;
    *weight_sync\\ gpu*) echo "torn_without_fence   1   >= 1   met" ;;
    *--make*) mkdir -p "$2"; echo made ;;
    *--used*) grep -q 4321 "${{@: -1}}" && printf 'peak_over_plan 1.01 <= 1.15 met\\nused_over_plan 0.93 <= 1 met\\n' ;;
    *) printf 'peak_over_plan 1.3 <= 1.15 MISSED\\nmfu 0.24 >= 0.2 met\\n'; exit 1 ;;
esac
"""
    fakes = {
        programs
        / "nvidia-smi": 'case "$*" in -L) echo "GPU 0: H100" ;; *loop*) while :; do echo 4321; sleep 0.1; done ;;'
        f' *) echo "NVIDIA H100, 580.1, {memory} MiB" ;; esac',
        programs / "python": python,
        root / "scripts/setup_env.sh": f"setup_env() {{ export PYTHON={programs}/python; }}",
        root / "scripts/install_engine.sh": f"echo {programs}/python",
        # Every run says what it was given, and is over.
        root / "run_grpo.sh": 'sleep 0.3; echo "$@"; echo "weights_verified versions=3"; '
        'echo "exported the policy after step $(sed "s/.*steps //;s/ .*//" '
        '<<<"$*")"',
    }
    for path, text in fakes.items():
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHON": str(programs / "python")}
    done = subprocess.run(
        [root / "scripts/verify_gpu.sh", "--quick", *options], env=environment, capture_output=True, text=True,
        timeout=PATIENCE_S * 4, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    folder = root / "outputs/verify_gpu_quick"
    statuses = {item["name"]: item["status"] for item in json.loads((folder / "results.json").read_text())["results"]}
    failed = {"marked_tests": "failed", "train_0.6b": "failed"} | left_out
    assert len(statuses) == 11 and {name: status for name, status in statuses.items() if status != "passed"} == failed
    # One table for the documentation: what was expected beside what was measured, also of what failed.
    page = (folder / "results.md").read_text()
    if options or memory < 24564:
        assert "needs vllm, and --no-engines" in page or "too small for this part: it needs 22 GB" in page
        return
    assert "| `colocated_sleep2` | passed |" in page and "| … used_over_plan | met | | <= 1 | 0.93 |" in page
    assert "| … peak_over_plan | missed | | <= 1.15 | 1.3 |" in page and "exit code 1" in page
    assert "--weight_sync.transport ipc" in (folder / "vllm_sleep2_ipc.log").read_text()


def test_figures_of_a_run_are_held_against_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts.verify_figures import figures
    from torchtitan.models.shape.costs import estimate_memory

    monkeypatch.setenv("TORCHTITAN_DEVICE", "cuda")
    monkeypatch.setattr("scripts.verify_figures.device_bytes_of_driver", lambda: 80 * 2**30)
    config = JobConfig()
    config.model.name, config.model.flavor, config.inference.backend = "qwen3", "0.6B", "colocated"
    config.inference.dtype, config.inference.sleep_level = "bfloat16", 2
    (tmp_path / "config.toml").write_text(config_to_toml(config))
    step = {"step": 3, "memory/device_peak_gib": 20.0, "memory/device_reserved_gib": 25.0, "mfu": 0.3}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step) + "\n" + json.dumps({"eval/x": 1}) + "\n")
    (tmp_path / "used").write_text("100\n81920\n200\n")
    found = {key: (value, bar) for key, value, _, bar in figures(tmp_path, 0.2, tmp_path / "used")}
    shape = read_shape(config)
    assert shape is not None
    memory = estimate_memory(config, shape, 1)
    assert found["peak_over_plan"][0] == pytest.approx(20 * 2**30 / memory.total)
    assert found["reserved_over_allocated"] == (1.25, 1.15) and found["mfu"] == (0.3, 0.2)
    sizes = re.findall(r"while (?:training|generating): (\S+) GiB", describe_plan(config, 1))
    assert found["used_over_plan"][0] == pytest.approx(80 / max(map(float, sizes)), rel=1e-3)
