"""A small language model that trains, for benchmarks whose actors are real engines."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.vllm_actor import make_model
from torchtitan.distributed.placement import unique_parameters
from torchtitan.utils.machine import keep_freed_memory

VOCABULARY = 1024


class PolicyTrainer:
    """Trains a random Qwen3 on random tokens with AdamW, on one thread; its checkpoint is in `folder`.

    About 4 * layers * hidden² parameters apart from the embedding; small_trainer.Trainer's interface.
    """

    def __init__(self, folder: Path, hidden: int, layers: int, rows: int):
        import transformers

        torch.set_num_threads(1)
        keep_freed_memory()
        make_model(folder, layers, hidden, VOCABULARY)
        self.folder = folder
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self._tokens = torch.randint(2, VOCABULARY, (1, rows))
        self.parameters = unique_parameters(dict(self.model.named_parameters()))

    @property
    def elements(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())

    def forward_backward(self) -> None:
        """Gradients of one batch."""
        self._optimizer.zero_grad(set_to_none=True)
        self.model(self._tokens, labels=self._tokens).loss.backward()

    def update(self) -> None:
        """The optimizer step."""
        self._optimizer.step()
