"""Make a policy that comes with the package: a Hugging Face directory with a tiny Qwen3 that barely solves a task.

    python scripts/make_debug_checkpoint.py --output torchtitan/assets/debug_arithmetic

The folder's name selects the task:

debug_arithmetic (two-digit addition) starts from random weights. A short run of supervised fine-tuning
(train_configs/sft_cpu.toml) follows, which stops at a target accuracy (sampled at temperature 1 on held-out pairs). A
third of the samples then earns a reward, and the rest of the learning is left to GRPO. With a name that ends in _moe,
the model is a tiny mixture of experts (Qwen3-MoE). debug_random skips the fine-tuning.

debug_guess, debug_calculator and debug_mix are trained to imitate a clumsy player instead (WARM_STARTS); that of
debug_mix plays both and adds two-digit numbers. The loss covers only what the player writes, not the prompts and
observations that it reads. The weights are written in bfloat16.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from torchtitan.config.rollout_tables import Rollout
from torchtitan.errors import UserError
from torchtitan.models.decoder import Decoder
from torchtitan.models.hf_checkpoint import export_policy, load_policy
from torchtitan.models.shape.exports import SHIPPED_FOLDER, newest_export
from torchtitan.models.shape.mixture_args import ExpertArgs
from torchtitan.models.shape.model_args import ModelArgs
from torchtitan.rollout.data.rows import arithmetic_rows, hold_out
from torchtitan.rollout.environments import builtin_environments as builtin
from torchtitan.utils.child_process import child_environment
from torchtitan.utils.json_lines import read_json_lines

SYMBOLS = ["<pad>", "<eos>", *"0123456789", *"+-*/=() ", "<bos>", "<unk>"]
PLAY_SYMBOLS = ["<pad>", "<eos>", *"0123456789", *"+=[]<>?!.", "<bos>", "<unk>"]
PAD, EOS = 0, 1
INDEX = {symbol: i for i, symbol in enumerate(PLAY_SYMBOLS)}
ROWS = 128

Play = list[tuple[str, bool]]
"""Texts, each with whether the player wrote it"""
# Below it the accuracy rises by .1 in ten supervised steps, so that a little more or less would change the start a lot.
TARGET_ACCURACY = 0.34
RUN_TIMEOUT_S = 1800.0


def debug_model_args(mixture: bool = False) -> ModelArgs:
    """Two Qwen3 layers with 298k parameters; as a mixture of 8 experts with 2 per token, 890k."""
    return ModelArgs(
        family="qwen3_moe" if mixture else "qwen3",
        experts=ExpertArgs(count=8, per_token=2, intermediate_size=128, normalize=True) if mixture else None,
        vocab_size=len(SYMBOLS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        eos_token_ids=(EOS,),
    )


def policy_args() -> ModelArgs:
    """Four smaller layers with 330k parameters, for the tasks in WARM_STARTS."""
    return replace(
        debug_model_args(), vocab_size=len(PLAY_SYMBOLS), hidden_size=96, intermediate_size=192, num_hidden_layers=4,
        head_dim=24,
    )  # fmt: skip


def guess_play(numbers: random.Random) -> Play:
    """Play a game as a player who heeds the answers only half of the time."""
    game = builtin.Guess()
    secret = numbers.randint(0, builtin.LARGEST)
    game.reset(secret)
    play: Play = [("?", False)]
    low, high, over = 0, builtin.LARGEST, False
    while not over:
        heeds = numbers.random() < 0.5
        number = numbers.randint(low, high) if heeds else numbers.randint(0, builtin.LARGEST)
        text = f"{number:02d}{builtin.END_OF_GUESS}"
        answer, _, over = game.step(text)
        low = max(low, number + 1) if answer == ">" else low
        high = min(high, number - 1) if answer == "<" else high
        play += [(text, True), (answer, False)]
    return play[:-1]


def calculator_play(numbers: random.Random, share: float = 0.1) -> Play:
    """Play as a player who uses the calculator for this share of the sums and makes up the other answers."""
    row = numbers.choice(_sums())
    if numbers.random() >= share:
        return [(row["prompt"], False), (f"{numbers.randrange(20000):05d}", True), ("<eos>", True)]
    a, b = row["prompt"].rstrip("=").split("+")
    result = builtin.add(int(a), int(b))
    return [(row["prompt"], False), (f"[{a}+{b}]", True), (result, False), (row["answer"], True), ("<eos>", True)]


@functools.cache
def _sums() -> list[dict[str, str]]:
    return builtin.calculator_rows()[: builtin.CALCULATOR_ROWS // 2]


def sums_play(numbers: random.Random, share: float) -> Play:
    """Add two numbers as a player who gets this share of the sums right, and a digit of the others wrong."""
    row = numbers.choice(_pairs())
    answer = row["answer"]
    if numbers.random() >= share:
        place = numbers.randrange(len(answer))
        answer = answer[:place] + str(numbers.randrange(10)) + answer[place + 1 :]
    return [(row["prompt"], False), (answer, True), ("<eos>", True)]


@functools.cache
def _pairs() -> list[dict[str, str]]:
    training, _ = hold_out(arithmetic_rows(), Rollout().held_out_fraction, "prompt")
    return training


def mixed_play(numbers: random.Random, share: float) -> Play:
    """Play one of the three tasks, sums as often as the two others together."""
    task = numbers.randrange(4)
    if task == 0:
        return guess_play(numbers)
    return calculator_play(numbers, share) if task == 1 else sums_play(numbers, share)


WARM_STARTS: dict[str, list[tuple[Callable[[random.Random], Play], int]]] = {
    "guess": [(guess_play, 450)],
    "calculator": [(calculator_play, 450)],
    # Among made-up answers, such a small model would not find out how the right ones come about in so few steps: it
    # learns them first, and then the habit of making them up.
    "mix": [(functools.partial(mixed_play, share=1.0), 400), (functools.partial(mixed_play, share=0.2), 50)],
}
"""Task -> what is imitated, and for how many supervised steps"""


def batches(play: Callable[[random.Random], Play], seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield endless batches of plays: tokens [ROWS, longest] and a bool mask of those that the player wrote."""
    numbers = random.Random(seed)
    while True:
        rows, written = [], []
        for _ in range(ROWS):
            parts = [
                (INDEX[symbol], own) for text, own in play(numbers) for symbol in ([text] if text in INDEX else text)
            ]
            rows.append(torch.tensor([token for token, _ in parts]))
            written.append(torch.tensor([own for _, own in parts]))
        pad = torch.nn.utils.rnn.pad_sequence
        yield pad(rows, batch_first=True, padding_value=PAD), pad(written, batch_first=True, padding_value=False)


def warm_start(policy: Decoder, task: str, seed: int) -> tuple[int, float]:
    """Train on the task's plays; return the supervised steps and the average probability of a whole play."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    likely, parts = 0.0, WARM_STARTS[task]
    for tokens, written in (one for play, steps in parts for one in itertools.islice(batches(play, seed), steps)):
        logits = policy.logits(tokens[:, :-1])
        loss = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none") * written[:, 1:]
        likely = 0.9 * likely + 0.1 * loss.detach().sum(1).neg().exp().mean().item()
        (loss.sum() / written.sum()).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return sum(steps for _, steps in parts), likely


def write_tokenizer(directory: Path, symbols: Sequence[str] = SYMBOLS) -> None:
    """Write a tokenizer of single characters in the format of Hugging Face's fast tokenizers."""
    tokenizer = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<bos>", "<unk>"])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "bos_token": "<bos>",
        "unk_token": "<unk>",
        "model_max_length": 256,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def fine_tune(start: Path, work: Path, seed: int) -> tuple[Path, int, float]:
    """Fine-tune `start` with train_configs/sft_cpu.toml up to the target accuracy; run folders go to `work`.

    Returns the export, the steps and the accuracy. Raises UserError if the run fails or misses the target.
    """
    options = {
        "job.dump_folder": work, "model.hf_assets_path": start, "eval.stop_at": TARGET_ACCURACY,
        "training.seed": seed, "training.threads": 1,
    }  # fmt: skip
    command = [sys.executable, "-m", "torchtitan.grpo_train", "--job.config_file", "sft_cpu"]
    for key, value in options.items():
        command += [f"--{key}", str(value)]
    done = subprocess.run(command, env=child_environment(1), stdout=subprocess.DEVNULL, timeout=RUN_TIMEOUT_S)
    if done.returncode:
        raise UserError(f"the warm start ended with exit code {done.returncode}")
    folder = work / "latest"
    last = [row for row in read_json_lines(folder / "metrics.jsonl") if row.get("eval/pass@1") is not None][-1]
    steps, accuracy = int(last["step"]), float(last["eval/pass@1"])
    if accuracy < TARGET_ACCURACY:
        raise UserError(f"the warm start did not reach an accuracy of {TARGET_ACCURACY} in {steps} steps")
    return Path(newest_export(str(folder))), steps, accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=SHIPPED_FOLDER / "debug_arithmetic")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # more threads are no faster at this size
    started = time.perf_counter()
    task = arguments.output.name.removeprefix("debug_")
    agent = task in WARM_STARTS
    policy = Decoder(policy_args() if agent else debug_model_args(task.endswith("_moe")))
    policy.initialize_weights(arguments.seed)
    steps, accuracy, what = 0, 0.0, "sampled at temperature 1, held-out accuracy"
    if agent:
        steps, accuracy = warm_start(policy, task, arguments.seed)
        what = "a play as imitated has probability"
    elif task != "random":
        with tempfile.TemporaryDirectory() as name:
            start = Path(name) / "start"
            export_policy(policy, start)
            write_tokenizer(start)
            made, steps, accuracy = fine_tune(start, Path(name), arguments.seed)
            policy = load_policy(made)
    export_policy(policy, arguments.output, dtype=torch.bfloat16)
    write_tokenizer(arguments.output, PLAY_SYMBOLS if agent else SYMBOLS)
    seconds = time.perf_counter() - started
    print(
        f"wrote {arguments.output}: {policy.args.num_parameters():,} parameters, {steps} supervised steps, "
        f"{what} {accuracy:.3g}, {seconds:.1f} s"
    )


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
