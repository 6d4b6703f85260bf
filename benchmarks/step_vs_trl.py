"""Seconds per GRPO step against TRL 1.16, and that both learn the same.

    benchmarks/peers/setup.sh
    python benchmarks/step_vs_trl.py --json

A tiny Qwen3 (4 layers, hidden 128, vocabulary 64), 8 prompts × 8 completions of 48 tokens, dapo with the clip range
0.2 / 0.28, AdamW, fp32, 20 steps. Ours in blocking mode with one embedded actor; trainer, actor and all helper
processes share one core, the one that TRL gets. The reward is the share of vowels in a completion, which a random
policy can learn. Seeds alternate between the two; step times are medians from the sixth step on.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import common

SYMBOLS = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz", *"0123456789", *"ABCDEFGHIJKLMNOPQRSTUVWXY"]
PROMPTS, GENERATIONS, NEW_TOKENS, PROMPT_LENGTH = 8, 8, 48, 8
LEARNING_RATE = 1e-3
WARM_STEPS, LAST_STEPS = 5, 3
RUN_SECONDS = 600
VARIABLES = {"TORCHTITAN_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def make_inputs(directory: Path, prompts: int) -> None:
    """A random checkpoint whose tokenizer has one token per character, and prompts; no token ends a completion."""
    import random

    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    from torchtitan.models.decoder import Decoder
    from torchtitan.models.hf_checkpoint import export_policy
    from torchtitan.models.model_args import ModelArgs

    assert len(SYMBOLS) == 64
    tokenizer = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SYMBOLS[:3])
    assets = directory / "assets"
    assets.mkdir()
    tokenizer.save(str(assets / "tokenizer.json"))
    # No end token: every completion has all its tokens.
    names = {"pad_token": "<pad>", "unk_token": "<unk>"}
    (assets / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
    args = ModelArgs(
        family="qwen3",
        vocab_size=len(SYMBOLS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=256,
    )
    with torch.device("cpu"):
        policy = Decoder(args)
    policy.initialize_weights(seed=0)
    export_policy(policy, directory / "model", assets_from=assets)
    rng = random.Random(0)
    rows = ["".join(rng.choices(SYMBOLS[3:], k=PROMPT_LENGTH)) for _ in range(prompts)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    (directory / "vowels.py").write_text(
        '"""The reward of both."""\n\n\n'
        "def vowels(completions, **columns):\n"
        '    """Share of lower-case vowels."""\n'
        '    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in completions]\n'
    )


def ours(folder: Path, seed: int, steps: int) -> tuple[list[float], list[float]]:
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
        "training.global_batch_size": PROMPTS * GENERATIONS,
        "training.seq_len": PROMPT_LENGTH + NEW_TOKENS + 8,
        "training.max_norm": 1.0,
        "grpo.async_weight_update": "false",
        "grpo.group_size": GENERATIONS,
        "grpo.drop_zero_variance": "false",
        "grpo.scale_rewards": "group",
        "rollout.dataset": folder / "prompts.jsonl",
        "rollout.max_completion_tokens": NEW_TOKENS,
        "rollout.max_staleness": 0,
        "rewards.functions": "vowels:vowels",
        "rewards.num_workers": 1,
        "inference.num_actors": 1,
        "inference.threads_per_actor": 1,
        "checkpoint.enable": "false",
        "eval.enable": "false",
    }
    rows = common.train(options, seconds=RUN_SECONDS, **VARIABLES, PYTHONPATH=f"{folder}:{common.REPOSITORY}")
    rows = [row for row in rows if "time/step_s" in row]
    if any(row["completion/length_mean"] != NEW_TOKENS for row in rows):
        sys.exit(f"completions ended before {NEW_TOKENS} tokens: the two would not do the same work")
    return [row["time/step_s"] for row in rows], [row["reward/mean"] for row in rows]


def trl(folder: Path, seed: int, steps: int) -> tuple[list[float], list[float]]:
    """Seconds and mean reward of every step."""
    result = folder / f"trl-{seed}.json"
    options = {
        "folder": str(folder),
        "output": str(result),
        "seed": seed,
        "steps": steps,
        "prompts": PROMPTS,
        "generations": GENERATIONS,
        "new_tokens": NEW_TOKENS,
        "learning_rate": LEARNING_RATE,
    }
    script = common.REPOSITORY / "benchmarks" / "peers" / "trl_steps.py"
    path = f"{folder}:{common.REPOSITORY}"
    common.run([common.peers_python(), script, json.dumps(options)], RUN_SECONDS, **VARIABLES, PYTHONPATH=path)
    found = json.loads(result.read_text())
    return found["seconds"], found["rewards"]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    common.peers_python()
    seeds, steps = (1, 8) if arguments.quick else (arguments.seeds, arguments.steps)
    found: dict[str, list[tuple[list[float], list[float]]]] = {"ours": [], "trl": []}
    common.run_on(arguments.core)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder, PROMPTS * (steps + 4))
        for seed in range(seeds):
            for who, work in (("ours", ours), ("trl", trl))[:: 1 if seed % 2 == 0 else -1]:
                found[who].append(work(folder, seed, steps))
                seconds, rewards = found[who][-1]
                middle = statistics.median(seconds[WARM_STEPS:])
                common.progress(
                    f"{who}, seed {seed}: {middle:.3f} s a step, reward {rewards[0]:.3f} → {rewards[-1]:.3f}"
                )
    ratios = [
        statistics.median(mine[0][WARM_STEPS:]) / statistics.median(theirs[0][WARM_STEPS:])
        for mine, theirs in zip(found["ours"], found["trl"], strict=True)
    ]
    last = {
        who: statistics.mean(statistics.mean(rewards[-LAST_STEPS:]) for _, rewards in runs)
        for who, runs in found.items()
    }
    figures = {
        "step_ratio": statistics.median(ratios),
        "reward_difference": abs(last["ours"] - last["trl"]),
        "reward_ours": last["ours"],
        "reward_trl": last["trl"],
        **{
            f"step_s_{who}": statistics.median(value for seconds, _ in runs for value in seconds[WARM_STEPS:])
            for who, runs in found.items()
        },
    }
    bars = {"step_ratio": ("<=", 0.8), "reward_difference": ("<=", 0.1)}
    conditions = {"seeds": seeds, "steps": steps, "core": arguments.core, "mode": "blocking, one embedded actor"}
    common.report("step_vs_trl", figures, bars, conditions, arguments.json)


if __name__ == "__main__":
    main()
