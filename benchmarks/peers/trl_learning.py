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
from trl import GRPOTrainer
from trl_config import grpo_config


def accuracy(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 where the last box holds the answer: results are whole numbers."""
    found = [re.findall(r"\\boxed\{(-?\d+)\}", text) for text in completions]
    return [float(bool(boxes) and boxes[-1] == right) for boxes, right in zip(found, answer, strict=True)]


def main() -> None:
    options = json.loads(sys.argv[1])
    rows = [json.loads(line) for line in Path(options["rows"]).read_text().splitlines()]
    batch = options["prompts"] * options["generations"]
    arguments = grpo_config(
        options,
        output_dir=f"{options['output']}-work",
        # A batch of samples, trained in so many optimizer steps of equal parts.
        per_device_train_batch_size=batch // options["minibatches"],
        steps_per_generation=options["minibatches"],
        max_steps=options["steps"] * options["minibatches"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=options["warmup"] * options["minibatches"],
        scale_rewards="none",
        logging_steps=options["minibatches"],
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
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    Path(f"{options['output']}-rewards.json").write_text(json.dumps(rewards))
    trainer.model.save_pretrained(options["output"])
    tokenizer.save_pretrained(options["output"])


if __name__ == "__main__":
    main()
