"""The peers' side of benchmarks/objectives_vs_peers.py: python objective_worker.py INPUTS OUTPUTS.

Runs in the environment of setup.sh. TRL's trainer is a real one on a tiny model; only its generation and its forward
are replaced, by the log-probs and entropies of INPUTS. What becomes of those is TRL's own code.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
# TRL asks for an acknowledgement of features that may change.
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

EOS = "<eos>"


def write_model(folder: Path) -> PreTrainedTokenizerFast:
    """A model for TRL to hold, which computes nothing here, and a tokenizer whose id 0 pads and 1 ends."""
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=64, num_key_value_heads=1, head_dim=8, **shape)).save_pretrained(folder)
    words = ["<pad>", EOS, *(chr(ord("0") + i) for i in range(62))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="0"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token=EOS)
    tokenizer.save_pretrained(folder)
    return tokenizer


class Trl:
    """One trainer with one set of options."""

    def __init__(self, folder: Path, tokenizer: Any, case: dict[str, Any], batch: dict[str, Any]):
        self.batch: dict[str, Any] = batch
        self.decoupled: bool = case["decoupled"]
        self.rloo: bool = case["rloo"]
        config, trainer = (RLOOConfig, RLOOTrainer) if self.rloo else (GRPOConfig, GRPOTrainer)
        # Without vLLM, GRPO asks for the proximal policy's log-probs where samples are used more than once.
        defaults = {} if self.rloo else {"num_iterations": 2, "scale_rewards": "none"}
        arguments = config(
            output_dir=str(folder / "out"),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=len(batch["tokens"]),
            num_generations=batch["generations"],
            max_completion_length=batch["longest"],
            report_to=[],
            gradient_checkpointing=False,
            **{**defaults, **case["trl"]},
        )
        self.trainer = trainer(
            model=str(folder / "model"),
            reward_funcs=[self._reward(number) for number in range(len(batch["rewards"]))],
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": "1"}]),
            processing_class=tokenizer,
        )
        # Samples of another engine than the trainer; as an option it would need that engine here.
        self.trainer.use_vllm = self.decoupled
        self.trainer.current_gradient_accumulation_steps = 1
        self.trainer._generate = self._generate
        self.trainer._get_per_token_logps_and_entropies = self._forward
        self.trainer.model.train()

    def _reward(self, number: int) -> Any:
        def reward(**_: Any) -> list[float | None]:
            given: list[float | None] = self.batch["rewards"][number]
            return given

        reward.__name__ = f"reward_{number}"
        return reward

    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        batch, texts = self.batch, ["text"] * len(prompts)
        ids = [row[kept.bool()].tolist() for row, kept in zip(batch["tokens"], batch["mask"], strict=True)]
        if self.rloo:
            return [[2]] * len(prompts), ids, texts
        sampling = None
        if self.decoupled:
            sampling = [row[kept.bool()].tolist() for row, kept in zip(batch["behaviour"], batch["mask"], strict=True)]
        return [[2]] * len(prompts), ids, None, texts, sampling, {}, None, []

    def _forward(self, model: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        batch = self.batch
        if model is self.trainer.ref_model and model is not None:
            return batch["reference"], batch["entropy"], None
        if not torch.is_grad_enabled():
            return batch["old" if self.decoupled else "behaviour"], batch["entropy"], None
        return self.log_probs, self.entropy, None

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Advantages that TRL makes of the rewards; loss with its gradients by log-probs and entropies [B, T]."""
        self.batch = batch
        self.log_probs = batch["now"].clone().requires_grad_()
        self.entropy = batch["entropy"].clone().requires_grad_()
        inputs = self.trainer._generate_and_score_completions([{"prompt": "1"}] * len(batch["tokens"]))
        found = {"advantages": inputs["advantages"]}
        if self.rloo:
            return found
        inputs["advantages"] = batch["advantages"]
        loss = self.trainer._compute_loss(self.trainer.model, inputs)
        gradients = torch.autograd.grad(loss, [self.log_probs, self.entropy], allow_unused=True)
        by_log_prob, by_entropy = (torch.zeros_like(self.log_probs) if grad is None else grad for grad in gradients)
        return {
            **found,
            "loss": loss.item(),
            "by_log_prob": by_log_prob,
            "by_entropy": by_entropy,
            "importance_ratio": inputs.get("importance_sampling_ratio"),
        }


def liger(case: dict[str, Any], batch: dict[str, Any], importance_ratio: torch.Tensor | None) -> dict[str, Any]:
    """Loss with its gradients by hidden states and weight; the importance ratio is TRL's, as when TRL calls it."""
    options = case["liger"]
    loss_of = LigerFusedLinearGRPOLoss(
        # torch.compile fails on its chunks here, see head_variants.py.
        **{"compiled": False, "beta": 0.0, "max_completion_length": batch["longest"], **options},
        use_ref_model=options.get("beta", 0.0) != 0.0,
    )
    hidden, weight = (batch[name].float().requires_grad_() for name in ("hidden", "weight"))
    mask = batch["mask"]
    if case["trl"].get("mask_truncated_completions"):
        mask = mask * batch["ended"][:, None]
    loss = loss_of(
        hidden,
        weight,
        batch["tokens"],
        mask.float(),
        batch["advantages"].float(),
        ref_per_token_logps=batch["reference"],
        old_per_token_logps=batch["old" if case["decoupled"] else "behaviour"],
        vllm_is_ratio=importance_ratio,
    )[0]
    gradients = torch.autograd.grad(loss, [hidden, weight])
    return {"loss": loss.item(), "by_hidden": gradients[0], "by_weight": gradients[1]}


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    given = torch.load(sys.argv[1], weights_only=True)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tokenizer = write_model(folder / "model")
        for case in given["cases"]:
            trainer = Trl(folder, tokenizer, case, given["batches"][0])
            for batch in given["batches"]:
                results = {"trl": trainer(batch)}
                if case["liger"] is not None:
                    results["liger"] = liger(case, batch, results["trl"]["importance_ratio"])
                found.append(results)
    torch.save(found, sys.argv[2])


if __name__ == "__main__":
    main()
