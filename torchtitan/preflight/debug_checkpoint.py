"""Make the policies of the built-in tasks: for each a Hugging Face directory with a tiny Qwen3 that barely does it.

For arithmetic, two-digit addition (in a folder whose name ends with _moe of a tiny mixture of experts, Qwen3-MoE):

Random weights, then a short supervised warm start on clean examples that stops on measured accuracy (sampled at
temperature 1 on held-out pairs): enough that some samples earn a reward, little enough that GRPO does the lifting.

    python -m torchtitan.preflight.debug_checkpoint --output outputs/assets/debug_arithmetic

The folder's name says the task: debug_guess and debug_calculator are those of agent_warm_start.py.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from torchtitan.errors import UserError
from torchtitan.models.decoder import Decoder
from torchtitan.models.expert_args import ExpertArgs
from torchtitan.models.hf_checkpoint import export_policy
from torchtitan.models.model_args import ModelArgs
from torchtitan.preflight import agent_warm_start
from torchtitan.rollout.datasets import arithmetic_rows, hold_out

SYMBOLS = ["<pad>", "<eos>", *"0123456789", *"+-*/=() ", "<bos>", "<unk>"]
PAD, EOS = 0, 1
# The warm start ends at the target; a checkpoint above the limit would leave GRPO too little to show.
TARGET_ACCURACY, ACCURACY_LIMIT = 0.10, 0.25


def debug_model_args(mixture: bool = False) -> ModelArgs:
    """Two Qwen3 layers, 298k parameters; as a mixture of 8 experts, of which each token has 2, 890k."""
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


def write_tokenizer(directory: Path, symbols: Sequence[str] = SYMBOLS) -> None:
    """A tokenizer of single characters, as Hugging Face's fast tokenizers read it."""
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


def encode(rows: list[dict[str, str]]) -> tuple[torch.Tensor, int]:
    """Rows as tokens [rows, prompt + answer + end] and the length of a prompt; all rows are equally long."""
    index = {symbol: i for i, symbol in enumerate(SYMBOLS)}
    tokens = [[index[c] for c in row["prompt"] + row["answer"]] + [EOS] for row in rows]
    return torch.tensor(tokens), len(rows[0]["prompt"])


@torch.no_grad()
def sampled_accuracy(policy: Decoder, tokens: torch.Tensor, prompt: int, samples: int, seed: int) -> float:
    """Share of exact answers, end token included, sampled at temperature 1."""
    generator = torch.Generator().manual_seed(seed)
    repeated = tokens.repeat(samples, 1)
    rows = repeated[:, :prompt]
    while rows.shape[1] < tokens.shape[1]:
        probabilities = policy.logits(rows)[:, -1].softmax(-1)
        rows = torch.cat((rows, torch.multinomial(probabilities, 1, generator=generator)), dim=1)
    return (rows == repeated).all(dim=1).float().mean().item()


def warm_start(policy: Decoder, held_out_fraction: float, seed: int, max_steps: int = 2000) -> tuple[int, float]:
    """Supervised steps until the target accuracy; returns steps and accuracy."""
    train, held_out = (encode(rows) for rows in hold_out(arithmetic_rows(), held_out_fraction))
    tokens, prompt = train
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(1, max_steps + 1):
        rows = tokens[torch.randint(len(tokens), (128,), generator=generator)]
        logits = policy.logits(rows[:, :-1])[:, prompt - 1 :]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, prompt:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            accuracy = sampled_accuracy(policy, *held_out, samples=2, seed=seed)
            if accuracy >= TARGET_ACCURACY:
                return step, accuracy
    raise UserError(f"the warm start did not reach an accuracy of {TARGET_ACCURACY} in {max_steps} steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/assets/debug_arithmetic"))
    parser.add_argument("--held-out-fraction", type=float, default=0.1, help="as rollout.held_out_fraction")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="more is no faster at this size")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    started = time.perf_counter()
    task = arguments.output.name.removeprefix("debug_")
    agent = task in agent_warm_start.WARM_STARTS
    policy = Decoder(agent_warm_start.policy_args() if agent else debug_model_args(task.endswith("_moe")))
    policy.initialize_weights(arguments.seed)
    if agent:
        steps, accuracy = agent_warm_start.warm_start(policy, task, arguments.seed)
        what = "a play as imitated has probability"
    else:
        steps, accuracy = warm_start(policy, arguments.held_out_fraction, arguments.seed)
        what = "sampled at temperature 1, held-out accuracy"
    if accuracy > ACCURACY_LIMIT:
        raise SystemExit(f"the warm start overshot: {what} {accuracy:.3f}, above {ACCURACY_LIMIT}")
    export_policy(policy, arguments.output)
    write_tokenizer(arguments.output, agent_warm_start.SYMBOLS if agent else SYMBOLS)
    seconds = time.perf_counter() - started
    print(
        f"wrote {arguments.output}: {policy.args.num_parameters():,} parameters, {steps} supervised steps, "
        f"{what} {accuracy:.3g}, {seconds:.1f} s"
    )


if __name__ == "__main__":
    main()
