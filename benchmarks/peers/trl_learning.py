"""TRL's side of benchmarks/learning.py: python trl_learning.py '{options}', in the environment of setup.sh."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def accuracy(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 where the last box holds the answer: results are whole numbers."""
    found = [re.findall(r"\\boxed\{(-?\d+)\}", text) for text in completions]
    return [float(bool(boxes) and boxes[-1] == right) for boxes, right in zip(found, answer, strict=True)]


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in Path(options["rows"]).read_text().splitlines()]
    batch = options["prompts"] * options["generations"]
    arguments = GRPOConfig(
        output_dir=f"{options['output']}-work",
        use_cpu=True,
        bf16=False,
        seed=options["seed"],
        # A batch of samples, trained in so many optimizer steps of equal parts.
        per_device_train_batch_size=batch // options["minibatches"],
        steps_per_generation=options["minibatches"],
        num_generations=options["generations"],
        max_completion_length=options["new_tokens"],
        max_steps=options["steps"] * options["minibatches"],
        learning_rate=options["learning_rate"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=options["warmup"] * options["minibatches"],
        adam_beta2=0.95,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        scale_rewards="none",
        temperature=1.0,
        gradient_checkpointing=False,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(options["model"])
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float32),
        reward_funcs=accuracy,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"], "answer": row["answer"]} for row in rows]),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.model.save_pretrained(options["output"])
    tokenizer.save_pretrained(options["output"])


if __name__ == "__main__":
    main()
