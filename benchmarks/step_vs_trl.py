"""Seconds per GRPO step against TRL 1.16, and that both learn the same.

    benchmarks/peers/setup.sh
    python benchmarks/step_vs_trl.py --json
    python benchmarks/step_vs_trl.py --case short --json
    python benchmarks/step_vs_trl.py --case gsm8k --questions train.jsonl --json

`toy` and `short` are a tiny Qwen3 (4 layers, hidden 128, vocabulary 64): 8 prompts × 8 completions of 48 tokens, and
8 × 16 completions of 6 tokens behind prompts of 20. `gsm8k` is the shape of SmolLM2-135M with 6 layers and random
weights: 8 × 8 completions behind questions of GSM8K's training file (JSON lines with "question"), with a token per
word or mark. Its seeds take completions of 64, 128 and 192 tokens in turn: all completions of a run are equally long,
so that TRL computes no padding behind them.

dapo with the clip range 0.2 / 0.28, AdamW, fp32, 20 steps. Ours in blocking mode with one embedded actor; trainer,
actor and all helper processes share one core, the one that TRL gets. The reward is the share of vowels in a completion,
which a random policy can learn. Seeds alternate between the two; step times are medians from the sixth step on.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common

SYMBOLS = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz", *"0123456789", *"ABCDEFGHIJKLMNOPQRSTUVWXY"]
PROMPTS = 8
LEARNING_RATE = 1e-3
WARM_STEPS, LAST_STEPS = 5, 3
RUN_SECONDS = 3600
VARIABLES = {"TORCHTITAN_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
TINY = {
    "family": "qwen3", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256,
}  # fmt: skip
SMOLLM2 = {
    "family": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192,
}  # fmt: skip
SMOLLM2_VOCABULARY = 49152


@dataclass
class Case:
    """What is trained: prompts of random characters, or, for a prompt length of 0, questions of a file."""

    generations: int
    prompt_length: int
    new_tokens: tuple[int, ...]
    """Of each seed, in turn"""
    model: dict[str, Any]
    bars: dict[str, tuple[str, float]]


ALIKE = {"reward_difference": ("<=", 0.1)}
CASES = {
    "toy": Case(8, 8, (48,), TINY, {"step_ratio": ("<=", 0.8)} | ALIKE),
    "short": Case(16, 20, (6,), TINY, {"step_ratio_short": ("<=", 0.35)} | ALIKE),
    "gsm8k": Case(8, 0, (64, 128, 192), SMOLLM2, {"step_ratio": ("<=", 0.6)} | ALIKE),
}


def words_of(questions: list[str], pattern: str) -> list[str]:
    """The vocabulary of SmolLM2's size whose first entries are special tokens and then the questions' commonest
    words; what is left are made-up words."""
    import re

    counts = Counter(word for question in questions for word in re.findall(pattern, question))
    common_words = [word for word, _ in counts.most_common(SMOLLM2_VOCABULARY - 3)]
    spare = (f"made-up-{number}" for number in range(SMOLLM2_VOCABULARY))
    return (SYMBOLS[:3] + common_words + list(spare))[:SMOLLM2_VOCABULARY]


def make_inputs(directory: Path, prompts: int, case: Case, file: Path | None) -> int:
    """A random checkpoint whose tokenizer has one token per character or word, and prompts; no token ends a completion.
    Returns the tokens of the longest prompt."""
    import random

    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    from torchtitan.models.decoder import Decoder
    from torchtitan.models.hf_checkpoint import export_policy
    from torchtitan.models.shape.model_args import ModelArgs

    rng = random.Random(0)
    vocabulary, pattern = SYMBOLS, "."
    if file is None:
        rows = ["".join(rng.choices(SYMBOLS[3:], k=case.prompt_length)) for _ in range(prompts)]
    else:
        rows = [json.loads(line)["question"] for line in file.read_text(encoding="utf-8").splitlines()]
        vocabulary, pattern = words_of(rows, r"\w+|[^\w\s]"), r"\w+|[^\w\s]"
        rows = rng.sample(rows, prompts)
    assert len(SYMBOLS) == 64
    tokenizer = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SYMBOLS[:3])
    assets = directory / "assets"
    assets.mkdir()
    tokenizer.save(str(assets / "tokenizer.json"))
    # No end token: every completion has all its tokens.
    names = {"pad_token": "<pad>", "unk_token": "<unk>"}
    (assets / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
    args = ModelArgs(vocab_size=len(vocabulary), tie_word_embeddings=True, **case.model)
    with torch.device("cpu"):
        policy = Decoder(args)
    policy.initialize_weights(seed=0)
    export_policy(policy, directory / "model", assets_from=assets)
    (directory / "prompts.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    (directory / "vowels.py").write_text(
        '"""The reward of both."""\n\n\n'
        "def vowels(completions, **columns):\n"
        '    """Share of lower-case vowels."""\n'
        '    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in completions]\n'
    )
    return max(len(tokenizer.encode(row).ids) for row in rows)


def ours(
    folder: Path, seed: int, steps: int, generations: int, new_tokens: int, longest: int
) -> tuple[list[float], list[float]]:
    """Seconds and mean reward of every step."""
    output = folder / f"ours-{seed}"
    options = {
        "job.dump_folder": output,
        "model.hf_assets_path": folder / "model",
        "optimizer.lr": LEARNING_RATE,
        "lr_scheduler.warmup_steps": 0,
        "lr_scheduler.decay_type": "constant",
        "training.steps": steps,
        "training.seed": seed,
        "training.threads": 1,
        "training.global_batch_size": PROMPTS * generations,
        "training.seq_len": longest + new_tokens + 8,
        "training.max_norm": 1.0,
        "grpo.async_weight_update": "false",
        "grpo.group_size": generations,
        "grpo.drop_zero_variance": "false",
        "grpo.scale_rewards": "group",
        "rollout.dataset": folder / "prompts.jsonl",
        "rollout.max_completion_tokens": new_tokens,
        "rollout.max_staleness": 0,
        "rewards.functions": "vowels:vowels",
        "rewards.num_workers": 1,
        "inference.num_actors": 1,
        "inference.threads_per_actor": 1,
        "checkpoint.enable": "false",
        "eval.num_prompts": 0,
    }
    rows = common.train(options, seconds=RUN_SECONDS, **VARIABLES, PYTHONPATH=f"{folder}:{common.REPOSITORY}")
    rows = [row for row in rows if "time/step_s" in row]
    if any(row["completion/length_mean"] != new_tokens for row in rows):
        sys.exit(f"completions ended before {new_tokens} tokens: the two would not do the same work")
    return [row["time/step_s"] for row in rows], [row["reward/mean"] for row in rows]


def trl(
    folder: Path, seed: int, steps: int, generations: int, new_tokens: int, longest: int
) -> tuple[list[float], list[float]]:
    """Seconds and mean reward of every step."""
    result = folder / f"trl-{seed}.json"
    options = {
        "folder": str(folder),
        "output": str(result),
        "seed": seed,
        "steps": steps,
        "prompts": PROMPTS,
        "generations": generations,
        "new_tokens": new_tokens,
        "learning_rate": LEARNING_RATE,
    }
    script = common.REPOSITORY / "benchmarks" / "peers" / "trl_steps.py"
    path = f"{folder}:{common.REPOSITORY}"
    common.run([common.peers_python(), script, json.dumps(options)], RUN_SECONDS, **VARIABLES, PYTHONPATH=path)
    found = json.loads(result.read_text())
    return found["seconds"], found["rewards"]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--case", choices=CASES, default="toy")
    parser.add_argument("--questions", type=Path, help="GSM8K's train.jsonl, for --case gsm8k")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    case = CASES[arguments.case]
    if (arguments.questions is None) == (arguments.case == "gsm8k"):
        sys.exit("--case gsm8k, and no other, needs --questions, the training file of GSM8K")
    common.peers_python()
    seeds, steps = (1, 8) if arguments.quick else (arguments.seeds, arguments.steps)
    load = os.getloadavg()[0]
    found: dict[str, list[tuple[list[float], list[float]]]] = {"ours": [], "trl": []}
    common.run_on(arguments.core)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        longest = make_inputs(folder, PROMPTS * (steps + 4), case, arguments.questions)
        for seed in range(seeds):
            for trainer, work in (("ours", ours), ("trl", trl))[:: 1 if seed % 2 == 0 else -1]:
                new_tokens = case.new_tokens[seed % len(case.new_tokens)]
                found[trainer].append(work(folder, seed, steps, case.generations, new_tokens, longest))
                seconds, rewards = found[trainer][-1]
                middle = statistics.median(seconds[WARM_STEPS:])
                common.progress(
                    f"{trainer}, seed {seed}: {middle:.3f} s a step, reward {rewards[0]:.3f} → {rewards[-1]:.3f}"
                )
    ratios = [
        statistics.median(our_run[0][WARM_STEPS:]) / statistics.median(trl_run[0][WARM_STEPS:])
        for our_run, trl_run in zip(found["ours"], found["trl"], strict=True)
    ]
    last = {
        trainer: statistics.mean(statistics.mean(rewards[-LAST_STEPS:]) for _, rewards in runs)
        for trainer, runs in found.items()
    }
    ratio = "step_ratio_short" if arguments.case == "short" else "step_ratio"
    figures = {
        ratio: statistics.median(ratios),
        "reward_difference": abs(last["ours"] - last["trl"]),
        "reward_ours": last["ours"],
        "reward_trl": last["trl"],
        **{
            f"step_s_{trainer}": statistics.median(value for seconds, _ in runs for value in seconds[WARM_STEPS:])
            for trainer, runs in found.items()
        },
    }
    conditions = {
        "case": arguments.case, "seeds": seeds, "steps": steps, "core": arguments.core,
        "mode": "blocking, one embedded actor", "load": f"{load:.1f} before, {os.getloadavg()[0]:.1f} after",
    }  # fmt: skip
    common.report("step_vs_trl", figures, case.bars, conditions, arguments.json)


if __name__ == "__main__":
    main()
