"""TRL's side of benchmarks/step_vs_trl.py: python trl_steps.py '{options}', in the environment of setup.sh."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOTrainer
from trl_config import grpo_config
from vowels import vowels


class Clock(TrainerCallback):
    """Seconds and rewards of every step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.rewards: list[float] = []
        self._begun = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._begun = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._begun)

    def on_log(self, _arguments: Any, _state: Any, _control: Any, logs: dict[str, float], **__: Any) -> None:
        if "reward" in logs:
            self.rewards.append(logs["reward"])


def main() -> None:
    options = json.loads(sys.argv[1])
    folder = Path(options["folder"])
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    # TRL asks for an end token; this one lies beyond the model's vocabulary, so that none is ever sampled.
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    # No token ends a completion: both generate the same number of tokens.
    model.generation_config.eos_token_id = None
    arguments = grpo_config(
        options,
        output_dir=str(folder / f"trl-{options['seed']}"),
        per_device_train_batch_size=options["prompts"] * options["generations"],
        max_steps=options["steps"],
        lr_scheduler_type="constant",
        scale_rewards="group",
        generation_kwargs={"eos_token_id": None},
        logging_steps=1,
    )
    clock = Clock()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=vowels,
        args=arguments,
        train_dataset=_dataset(rows),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    Path(options["output"]).write_text(json.dumps({"seconds": clock.seconds, "rewards": clock.rewards}))


def _dataset(rows: list[dict[str, str]]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


if __name__ == "__main__":
    main()
