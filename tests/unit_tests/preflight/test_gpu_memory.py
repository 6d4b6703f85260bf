"""What a rank needs, by the plan, against the memory of its GPU, which the driver says."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit_tests.conftest import WriteConfig
from tests.unit_tests.preflight.test_shipped_configs import FOR_GPUS
from torchtitan.config.job_config import JobConfig
from torchtitan.inference import placement
from torchtitan.models.shape.checkpoint_shape import read_shape
from torchtitan.models.shape.costs import estimate_memory, on_device
from torchtitan.preflight.__main__ import main
from torchtitan.preflight.gpu_memory import STEP_TOKENS, gpu_problem, largest_micro_batch, tight_gpu
from torchtitan.preflight.step_time import describe_step_time, generation_seconds
from torchtitan.preflight.validate import load_config
from torchtitan.utils import cards, machine

CONFIGS = Path(__file__).resolve().parents[3] / "train_configs"
# MiB, as nvidia-smi says them.
MIB = {24: 24564, 40: 40960, 48: 49140, 80: 81559}


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What nvidia-smi answers; a card that can be changed."""
    answers = {"name": "NVIDIA A10G", "memory.total": str(MIB[24])}
    for module in (placement, cards):
        monkeypatch.setattr(
            module, "ask_driver", lambda query, *_: answers[query.removeprefix("--query-gpu=")].splitlines()
        )
    monkeypatch.setenv("TORCHTITAN_DEVICE", "cuda")
    return answers


def planned(name: str, monkeypatch: pytest.MonkeyPatch) -> JobConfig:
    monkeypatch.setenv("WORLD_SIZE", str(FOR_GPUS[name]))
    return load_config(["--job.config_file", str(CONFIGS / f"{name}.toml"), "--dry-run"])


@pytest.mark.parametrize(
    ("name", "verdicts"),
    [
        # On 24, 40, 48 and 80 GB: + fits, ? a warning, - refused.
        ("qwen3_0.6b_1gpu", "++++"),
        ("qwen3_0.6b_gsm8k_vllm", "-+++"),
        ("llama3.1_8b_gsm8k_sglang", "---+"),
        ("qwen2.5_math_7b_colocated", "-??+"),
        ("llama3.1_8b_128k_8gpu", "-+++"),
        ("qwen3_30b_a3b_8gpu", "---+"),
        ("gpt_oss_20b_8gpu", "---+"),
        ("qwen3.5_9b_8gpu", "-?++"),
        ("qwen2.5_math_72b_4nodes", "--?+"),
    ],
)
def test_which_recipe_fits_which_card(
    name: str, verdicts: str, card: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, ranks = planned(name, monkeypatch), FOR_GPUS[name]
    args, found = read_shape(config), ""
    for mib in MIB.values():
        card["memory.total"] = str(mib)
        problem, warning = gpu_problem(config, args, ranks), tight_gpu(config, ranks)
        found += "-" if problem else "?" if warning else "+"
        # What is named would fit, and a little more would not.
        fitting = largest_micro_batch(config, args, ranks, 0.9 * mib * 2**20)
        if warning and fitting is not None:
            assert warning.endswith(f"training.tokens_per_micro_batch = {fitting} would fit")
            assert [_needs(config, fitting + more, ranks) <= 0.9 * mib * 2**20 for more in (0, STEP_TOKENS)] == [
                True,
                False,
            ]
    assert found == verdicts


def _needs(config: JobConfig, tokens: int, ranks: int) -> int:
    changed = copy.copy(config)
    changed.training = replace(config.training, tokens_per_micro_batch=tokens)
    return on_device(changed, estimate_memory(changed, read_shape(changed), ranks))


def test_a_start_that_cannot_fit_is_refused_and_its_plan_says_so(
    card: dict[str, str],
    write_config: WriteConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [*write_config(), "--training.tokens_per_micro_batch", str(1 << 22)]
    card["memory.total"] = "600"
    assert main(arguments) == 2
    refused = "training.tokens_per_micro_batch = 4194304 is not allowed: by the plan a rank needs"
    assert refused in capsys.readouterr().err
    assert main(["--dry-run", *arguments]) == 0
    assert "WARNING: a run does not start on this machine: by the plan a rank needs" in capsys.readouterr().out
    # On a CPU the GPU's memory does not matter.
    monkeypatch.setenv("TORCHTITAN_DEVICE", "cpu")
    assert tight_gpu(load_config(["--dry-run", *arguments]), 1) == ""


def test_ranks_have_the_largest_of_unlike_cards_and_memory_that_is_not_said_refuses_nothing(
    card: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card for the screen beside the one that trains: the driver's order is not CUDA's."""
    config = planned("qwen3_0.6b_1gpu", monkeypatch)
    args = read_shape(config)
    card["memory.total"] = f"2048\n{MIB[24]}"
    assert gpu_problem(config, args, 1) is None and tight_gpu(config, 1) == ""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert gpu_problem(config, args, 2) is not None
    for answer in ("", "[N/A]", f"[N/A]\n{MIB[24]}"):
        card["memory.total"] = answer
        assert gpu_problem(config, args, 2) is None and tight_gpu(config, 2) == ""


def test_a_driver_that_fails_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho asked >> {tmp_path}/calls\nexit 1\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    machine.ask_driver.cache_clear()
    try:
        assert [placement.device_bytes_of_driver() for _ in range(3)] == [None] * 3
    finally:
        machine.ask_driver.cache_clear()
    assert (tmp_path / "calls").read_text() == "asked\n"


def test_an_engine_without_room_beside_its_rank_is_refused_before_ranks_start(
    card: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks' part fits this card, and what it leaves is less than the weights of a second model."""
    config = planned("qwen2.5_math_7b_colocated", monkeypatch)
    args = read_shape(config)
    card["memory.total"] = str(MIB[80])
    assert gpu_problem(config, args, 8) is None
    config.inference.sleep_level = 0
    card["memory.total"] = str(MIB[48])
    problem = gpu_problem(config, args, 8)
    assert problem is not None and problem[0] == "inference.colocated.tensor_parallel_size"
    assert "no room for one sequence of training.seq_len" in problem[1] and "does not start" in tight_gpu(config, 8)
    config.inference.sleep_level = 1
    assert gpu_problem(config, args, 8) is None


def test_states_that_are_too_large_name_what_makes_them_smaller(
    card: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = planned("llama3.1_8b_gsm8k_sglang", monkeypatch)
    problem = gpu_problem(config, read_shape(config), 4)
    assert problem is not None and problem[0] == "model.hf_assets_path"
    assert "the optimizer's state alone take 29.9" in problem[1] and "lora.rank = 16" in problem[1]


@pytest.mark.parametrize(
    ("name", "running", "before", "kept"),
    [
        # Sequences that an engine generates at a time; the mean number of tokens before the next one; and the numbers
        # that are read of them, by the published config.json: in all 28 layers, or in half of 24 those of the last 128
        # tokens, or in 24 of 32 a state.
        ("qwen3_0.6b_1gpu", 64, 1024, 28 * 1024 * 2 * 8 * 128),
        ("gpt_oss_20b_8gpu", 128, 2560, 12 * (2560 + 128) * 2 * 8 * 64),
        ("qwen3.5_9b_8gpu", 64, 2560, 8 * 2560 * 2 * 4 * 256 + 24 * 32 * 128 * 128),
    ],
)
def test_a_decode_step_reads_the_weights_and_what_is_kept_of_each_sequence(
    name: str, running: int, before: int, kept: int, card: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the hardware's limit nothing else is read: of a layer with a window, or with a state, not all tokens."""
    config, ranks = planned(name, monkeypatch), FOR_GPUS[name]
    args, inference = read_shape(config), config.inference
    engines = ranks // inference.engine.tensor_parallel_size
    each, longest = config.training.global_batch_size // engines, config.rollout.max_completion_tokens
    assert (running, before) == (min(each, inference.max_sequences), config.training.seq_len - longest / 2)
    read = 2 * (args.num_parameters() + running * kept) / inference.engine.tensor_parallel_size
    expected = each / running * longest * read / (0.6 * cards.H100.bandwidth)
    assert generation_seconds(config, args, ranks, cards.H100) == pytest.approx(expected)


def test_times_are_those_of_the_card(card: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An A10G is slower than an H100 by its data sheet, and an unknown card is planned as one."""
    config = planned("qwen3_0.6b_1gpu", monkeypatch)
    args, seconds = read_shape(config), []
    for name, source in (("NVIDIA A10G", "NVIDIA A10G, data sheet"), ("NVIDIA X1", "as if on H100s: NVIDIA X1 is not")):
        card["name"] = name
        line = describe_step_time(config, args, 1)[0]
        assert line.startswith("step at the hardware's limit: ") and source in line
        seconds.append(float(line.split()[5].replace(",", "")))
    assert seconds[0] > 4 * seconds[1]
