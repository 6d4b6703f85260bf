"""The configurations in train_configs/, and the commands that take one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.unit_tests.conftest import WriteConfig
from torchtitan.models.shape.exports import SHIPPED_FOLDER
from torchtitan.preflight import plan
from torchtitan.preflight.__main__ import main
from torchtitan.preflight.validate import load_config

ROOT = Path(__file__).resolve().parents[3]


FOR_GPUS = {
    "qwen3_30b_a3b_8gpu": 8,
    "gpt_oss_20b_8gpu": 8,
    "qwen3.5_9b_8gpu": 8,
    "llama3.1_8b_128k_8gpu": 8,
    "qwen3_0.6b_gsm8k_vllm": 1,
    "qwen3_0.6b_1gpu": 1,
    "qwen2.5_math_7b_colocated": 8,
    "qwen2.5_math_72b_4nodes": 32,
    "llama3.1_8b_gsm8k_sglang": 4,
}


@pytest.mark.parametrize("name", FOR_GPUS)
def test_shipped_configurations_for_gpus_are_planned_without_their_files(
    name: str, write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config()
    monkeypatch.setenv("WORLD_SIZE", str(FOR_GPUS[name]))
    monkeypatch.setenv("TORCHTITAN_DEVICE", "cuda")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "empty")
    device_bytes = (24 if name == "qwen3_0.6b_1gpu" else 80) * 2**30
    monkeypatch.setattr(plan, "device_bytes_of_driver", lambda: device_bytes)
    file = ROOT / "train_configs" / f"{name}.toml"
    assert main(["--dry-run", "--job.config_file", str(file)]) == 0
    output = capsys.readouterr().out
    assert "memory estimate per rank" in output and "DOES NOT FIT" not in output
    assert "step at the hardware's limit: " in output and "what takes longest: " in output
    for half in re.findall(r"while (?:training|generating): (\S+) GiB", output):
        assert float(half) * 2**30 < device_bytes
    # Without its files nothing but planning is possible, and what is missing is said.
    assert main(["--job.config_file", str(file)]) == 2
    assert "model.hf_assets_path" in capsys.readouterr().err


@pytest.mark.parametrize("name", FOR_GPUS)
def test_commands_in_the_headers_of_configurations_for_gpus_exist(name: str) -> None:
    text = (ROOT / "train_configs" / f"{name}.toml").read_text(encoding="utf-8")
    header = text[: text.index("[job]")]
    scripts = set(re.findall(r"\S*?((?:scripts/|\./)\w+\.(?:sh|slurm))", header))
    assert scripts and all((ROOT / script).is_file() for script in scripts)
    assert re.findall(r"CONFIG_FILE=(\S+)", header) == [f"train_configs/{name}.toml"]
    # The extra data brings datasets; the model is one of the Hub.
    assert "EXTRAS=data" in header
    assert re.search(r'^hf_assets_path = "[\w-]+/[\w.-]+"$', text, re.MULTILINE)
    engine = re.findall(r"scripts/install_engine\.sh (\w+)", header)
    (backend,) = re.findall(r'^backend = "(\w+)"$', text, re.MULTILINE)
    assert engine == ["vllm" if backend == "colocated" else backend]
    ranks = [int(count) for count in re.findall(r"NGPU=(\d+)", header)]
    assert ranks in ([], [FOR_GPUS[name]]) and (ranks or FOR_GPUS[name] == 1)


DEBUG = sorted(file for file in (ROOT / "train_configs").glob("*.toml") if file.stem not in FOR_GPUS)


@pytest.mark.parametrize("file", DEBUG, ids=lambda path: path.stem)
def test_shipped_configurations(file: Path, write_config: WriteConfig) -> None:
    write_config()
    if re.search(r'^hf_assets_path = "(debug_\w+)"$', file.read_text(), re.MULTILINE) and file.stem != "distill_cpu":
        config = load_config(["--job.config_file", str(file), "--parallelism.expert_parallel_degree", "1"])
        assert Path(config.model.hf_assets_path).parent == SHIPPED_FOLDER
        return
    # A checkpoint of their own shape is not here, so only what does not depend on it is looked at.
    changes = ["--model.hf_assets_path", "checkpoint", "--training.seq_len", "128"]
    changes += ["--distill.teacher", "checkpoint"] if file.stem == "distill_cpu" else []
    changes += ["--rollout.stop_token_ids", "[]"] if file.stem in ("smollm2_cpu", "smollm2_tool_cpu") else []
    changes += ["--rollout.max_completion_tokens", "64"] if file.stem == "coding_cpu" else []
    if file.stem == "gsm8k_cpu":
        Path("gsm8k.jsonl").write_text('{"question": "What is 1 + 1?", "answer": "#### 2"}\n')
    load_config(["--job.config_file", str(file), *changes, "--parallelism.expert_parallel_degree", "1"])


@pytest.mark.slow
def test_entry_points_answer_without_traceback_and_without_torch(write_config: WriteConfig) -> None:
    arguments = [*write_config(), "--grpo.group_size", "1", "--training.stepz", "3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for module in ("torchtitan.preflight", "torchtitan.grpo_train"):
        command = [sys.executable, "-X", "importtime", "-m", module, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE_S, check=False)
        assert done.returncode == 2
        imported, _, message = done.stderr.partition("error: ")
        assert message.startswith("2 configuration problems:\n")
        assert "Traceback" not in done.stderr
        assert "| torch\n" not in imported


def test_help_and_the_plan_import_only_what_they_need(write_config: WriteConfig) -> None:
    heavy = {"torch", "numpy", "aiohttp"}
    for option, barred in (("--help", heavy | {"asyncio", "jinja2", "msgspec", "tokenizers"}), ("--dry-run", heavy)):
        launch = ["torchtitan.start", "--standalone", "--nproc-per-node", "1", "--", *write_config(), option]
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", *launch], capture_output=True, text=True, timeout=PATIENCE_S,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True,
        )  # fmt: skip
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert "torchtitan.config.reading" in imported and not imported & barred
