"""Five tasks of reasoning-gym as the five sources of a run, each with its own verifier as the reward.

    ./scripts/setup_env.sh real && .venv/bin/python examples/real/several.py MODEL [STEPS]

MODEL is a checkpoint directory with a chat template. Every batch has four groups of each task (docs/sources.md).
"""

import sys

import reasoning_gym

from torchtitan import Source, train


def rows(task):
    return [{"prompt": one["question"], "entry": one} for one in reasoning_gym.create_dataset(task, size=500, seed=1)]


def verified(completions, entry, **kwargs):
    score = reasoning_gym.get_score_answer_fn(entry[0]["metadata"]["source_dataset"])
    return [score(text.strip(), one) for text, one in zip(completions, entry, strict=True)]


TASKS = "chain_sum", "letter_counting", "spell_backward", "leg_counting", "number_sorting"
SETTINGS = {
    "rollout.chat_template": True, "rollout.max_completion_tokens": 64, "training.seq_len": 512,
    "training.global_batch_size": 160, "training.steps": int(sys.argv[2]) if len(sys.argv) > 2 else 100,
    # A laptop's share: adapters, half precision where the processor has it, one actor.
    "lora.rank": 16, "lora.alpha": 32.0, "optimizer.lr": 2e-4, "training.mixed_precision_param": "auto",
    "training.tokens_per_micro_batch": 2048, "inference.dtype": "auto", "inference.num_actors": 1,
    "eval.num_prompts": 24,
}  # fmt: skip
train(sys.argv[1], SETTINGS, sources=[Source(name=task, dataset=rows(task), rewards=verified) for task in TASKS])
