"""Small models that train, for scenarios in which a trainer's steps are timed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from torchtitan.distributed.placement import unique_parameters
from torchtitan.utils.machine import keep_freed_memory

VOCABULARY = 16384
TRAINED_VOCABULARY = 1024


def language_model_shapes(layers: int, hidden: int, vocabulary: int) -> list[tuple[int, ...]]:
    """Shapes of a Qwen3-like model's tensors: embedding, 11 a layer, final norm."""
    attention = [(2 * hidden, hidden), (hidden, hidden), (hidden, hidden), (hidden, 2 * hidden), (128,), (128,)]
    feed_forward = [(3 * hidden, hidden), (3 * hidden, hidden), (hidden, 3 * hidden), (hidden,), (hidden,)]
    return [(vocabulary, hidden), *(attention + feed_forward) * layers, (hidden,)]


def make_qwen3(folder: Path, layers: int, hidden: int, vocabulary: int = VOCABULARY) -> int:
    """Write a random Qwen3 in bfloat16 without a tokenizer; returns its number of parameters."""
    import transformers

    torch.manual_seed(0)
    heads = max(2, hidden // 64)
    config = transformers.Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=max(32, 2 * hidden // heads),
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=1,
    )
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


class Trainer:
    """Trains a model with AdamW on the same batch over and over, on one thread. loss: of that batch."""

    def __init__(self, model: nn.Module, loss: Callable[[], torch.Tensor], learning_rate: float):
        torch.set_num_threads(1)
        keep_freed_memory()
        self._loss = loss
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
        self.parameters = unique_parameters(dict(model.named_parameters()))
        self.elements = sum(parameter.numel() for parameter in self.parameters.values())

    def forward_backward(self) -> None:
        """Gradients of the batch."""
        self._optimizer.zero_grad(set_to_none=True)
        self._loss().backward()

    def update(self) -> None:
        """The optimizer step."""
        self._optimizer.step()


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


def residual_trainer(width: int, blocks: int, rows: int) -> Trainer:
    """A residual MLP on noise: about 4 * blocks * width² parameters, and 6 floating point operations for each of them
    and each of `rows` rows."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*(Block(width) for _ in range(blocks)))
    rows_in, rows_out = torch.randn(rows, width), torch.randn(rows, width)
    return Trainer(model, lambda: nn.functional.mse_loss(model(rows_in), rows_out), 1e-4)


def qwen3_trainer(folder: Path, hidden: int, layers: int, rows: int) -> Trainer:
    """A random Qwen3 on random tokens, whose checkpoint is in `folder`: about 4 * layers * hidden² parameters apart
    from the embedding."""
    import transformers

    torch.set_num_threads(1)
    make_qwen3(folder, layers, hidden, TRAINED_VOCABULARY)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.randint(2, TRAINED_VOCABULARY, (1, rows))
    return Trainer(model, lambda: model(tokens, labels=tokens).loss, 1e-5)
