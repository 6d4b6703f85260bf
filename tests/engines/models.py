"""Small random models that every engine can run, and what transformers says about them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.roundings import forward_rounding
from torchtitan.models.shape.model_args import ModelArgs

# The debug tokenizer's; engines want one that is a multiple of 8 under tensor parallelism.
VOCABULARY = 64
HIDDEN, INTERMEDIATE, LAYERS = 128, 256, 3
END = 1

# Two engines' log-probs in fp32, which for these models are at most 12.
FP32_TOLERANCE = forward_rounding(ModelArgs("qwen3", VOCABULARY, HIDDEN, INTERMEDIATE, LAYERS, 4, 2, 32), 12)
# In bfloat16 sums are formed in fp32, and only results are rounded, by 2^-8 of their size at most: 8 in each layer, the
# embedding and the logits, in either engine, independently of each other; logits are spread by 1.4. That makes 0.04 at
# most, as a root mean square. (All sums in bfloat16, in any order, would be apart by up to 5.)
BF16_SPREAD = 2**-8 * math.sqrt(2 * (8 * LAYERS + 2)) * 1.4
# Four times as much for the worst of a few dozen tokens.
BF16_TOLERANCE = 4 * BF16_SPREAD


def make_model(directory: Path, tied: bool = True, dtype: str = "float32", seed: int = 0, **overrides: Any) -> Path:
    """Write a random Qwen3 (3 layers, hidden 128, 4 query and 2 key-value heads of 32) with the debug tokenizer.

    Weights are so large that log-probs differ by whole nats from token to token: whatever is stale or torn shows.
    """
    import transformers

    from scripts.make_debug_checkpoint import write_tokenizer

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": None,
        "torch_dtype": dtype,
    }
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**(shape | overrides)))
    randomize(model, seed)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int) -> None:
    """Random weights from the seed: matrices around 0, norms around 1."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.1 * noise if parameter.dim() == 1 else 0.12 * noise)


def randomize_adapters(policy: torch.nn.Module, seed: int) -> None:
    """Adapters of our policy, and its final norm, from the seed; on any layout."""
    from torchtitan.distributed.placement import copy_full_
    from torchtitan.models.adapter_math import is_factor

    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if is_factor(name):
            copy_full_(parameter, 0.15 * noise)
        elif name == "model.norm.weight":
            copy_full_(parameter, 1 + 0.1 * noise)


@cache
def _loaded(directory: Path, dtype: str) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()


@torch.no_grad()
def log_probs(directory: Path, token_ids: Sequence[int], dtype: str = "float32") -> list[float]:
    """What transformers says of every token but the first, at temperature 1."""
    logits = _loaded(directory, dtype)(torch.tensor([list(token_ids)])).logits[0, :-1].float()
    ids = torch.tensor(list(token_ids))[1:, None]
    return logits.log_softmax(-1).gather(1, ids)[:, 0].tolist()


@torch.no_grad()
def greedy(directory: Path, prompt: Sequence[int], tokens: int, dtype: str = "float32") -> list[int]:
    """The most likely continuation according to transformers, up to and with the end token."""
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(_loaded(directory, dtype)(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == END:
            break
    return ids[len(prompt) :]
