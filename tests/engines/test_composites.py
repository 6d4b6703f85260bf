"""Runs that train the text model of a composite checkpoint, with a server that starts from the same folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from scripts.make_debug_checkpoint import write_tokenizer
from tests.composites import make_composite
from tests.engines.models import END, VOCABULARY
from tests.processes import Processes
from tests.runs import RUN_SECONDS, Run

pytestmark = pytest.mark.timeout(2 * RUN_SECONDS)
STEPS = 10
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 128, "head_dim": 32, "bos_token_id": None, "eos_token_id": END}
# As many elements as half a head has, which vLLM asks for.
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}}
INTERLEAVED = {"rope_parameters": {**SECTIONS["rope_parameters"], "mrope_interleaved": True}}


def flatten(model: Path) -> None:
    """Divide embedding and head, so that every token is sampled now and then."""
    tensors = load_file(model / "model.safetensors")
    for name in tensors:
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            tensors[name] = tensors[name] / 8
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def name_as_published(model: Path) -> None:
    """Give Gemma 3's vision tower the names that its files have at the Hub; transformers 5 writes others."""
    tensors = load_file(model / "model.safetensors")
    published = {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor
        for name, tensor in tensors.items()
        if not name.startswith("vision_tower.head.")
    }
    save_file(published, model / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.usefixtures("vllm_python")
@pytest.mark.parametrize(
    ("family", "shape", "rank"),
    [("gemma3", {}, 0), ("mistral3", {}, 4), ("qwen3_vl", INTERLEAVED, 0), ("qwen2_5_vl", SECTIONS, 0)],
    ids=["gemma3", "mistral3-adapters", "qwen3_vl", "qwen2_5_vl"],
)
def test_vllm_serves_the_text_of_a_composite_as_it_is_trained(
    family: str, shape: dict[str, Any], rank: int, processes: Processes, tmp_path: Path
) -> None:
    check_run("vllm", make_composite(tmp_path / "model", family, **SHAPE, **shape), rank, processes)


@pytest.mark.usefixtures("sglang_python")
@pytest.mark.parametrize(("family", "shape"), [("gemma3", {}), ("qwen3_vl", INTERLEAVED)], ids=["gemma3", "qwen3_vl"])
def test_sglang_serves_the_text_of_a_composite_as_it_is_trained(
    family: str, shape: dict[str, Any], processes: Processes, tmp_path: Path
) -> None:
    model = make_composite(tmp_path / "model", family, **SHAPE, **shape)
    name_as_published(model)
    check_run("sglang", model, 0, processes)


def check_run(engine: str, model: Path, rank: int, processes: Processes) -> None:
    """Train ten versions of it, and hold what the engine samples and answers to probes against the trainer."""
    flatten(model)
    write_tokenizer(model)
    run = Run(
        processes, f"debug_cpu_{engine}", model, model.parent,
        "--training.steps", str(STEPS), "--training.global_batch_size", "64", "--eval.num_prompts", "0",
        "--inference.max_sequences", "64", "--grpo.async_weight_update", "false",
        "--weight_sync.verify", "probe", "--weight_sync.probe_tolerance", "1e-4",
        "--rewards.functions", "tests.unit_tests.rollout.reward_examples:share_of_digits",
        "--lora.rank", str(rank), "--inference.health_timeout_s", "60",
    )  # fmt: skip
    run.end()
    steps = run.steps()
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert sum(row["grad_norm"] > 0 for row in steps) > STEPS // 2, [row["grad_norm"] for row in steps]
    # A step may hold no sample of its own version.
    mismatches = [row["mismatch_kl/same_version"] for row in steps if row.get("mismatch_kl/same_version") is not None]
    assert mismatches and max(mismatches) < 1e-6
    assert [row["weight_sync/actor-0/version"] for row in steps] == list(range(1, STEPS + 1))
    # The run ends without waiting for the probes of its last versions.
    assert steps[-1]["inference/probed_version"] >= STEPS - 3 and not run.events("weights_differ")
