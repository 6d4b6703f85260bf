"""Gated DeltaNet in a real vLLM: a version that is loaded later is what an engine that starts with it computes with."""

from __future__ import annotations

from pathlib import Path

import torch

from scripts.make_debug_checkpoint import write_tokenizer
from tests.delta_models import make_delta
from tests.engines.models import END, VOCABULARY
from tests.engines.vllm_traps import PROBE, SCORED, cases
from torchtitan.models.hf_checkpoint import export_policy, load_policy
from torchtitan.models.layers.attention import PackedLayout

# vLLM's CPU build computes these layers in bfloat16, with heads of 128.
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "eos_token_id": END,
    "bos_token_id": None,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
# Measured .05 in the mean of eight tokens; another version's are apart by whole nats.
BF16_SPREAD = 0.3


def test_loaded_layers_are_those_that_were_sent(vllm_python: Path, tmp_path: Path) -> None:
    policy = load_policy(make_delta(tmp_path / "model", "qwen3_next", **SIZES))
    folders, expected = [tmp_path / "old", tmp_path / "new"], []
    generator, tokens = torch.Generator().manual_seed(0), torch.tensor(PROBE)
    for folder in folders:
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
            log_probs, _ = policy(tokens, PackedLayout([len(tokens)]), tokens.roll(-1))
        export_policy(policy, folder, dtype=torch.bfloat16)
        write_tokenizer(folder)
        expected.append(log_probs[:-1][-SCORED:])
    old, new = map(str, folders)
    first, second = cases(vllm_python, [(old, new, ["loaded", "in_place", "found"]), (new, old, ["loaded"])])
    assert first["loaded"] == first["in_place"] == second["first"]
    assert second["loaded"] == first["first"] != second["first"]
    for found, reference in ((first["first"], expected[0]), (second["first"], expected[1])):
        assert (torch.tensor(found) - reference).abs().mean() < BF16_SPREAD
    # The check of live weights sees a doubled element, and nothing else.
    assert first["found"].pop("") == [] and all(len(names) == 1 for names in first["found"].values())
