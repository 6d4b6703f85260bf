"""Log-probs of the embedded engine against the trainer's packed forward, and of one of its packs against another.

    python benchmarks/engine_log_probs.py --model outputs/latest/export --json       a checkpoint and the built-in task
    python benchmarks/engine_log_probs.py --flavor qwen3/0.6B --layers 2 --json      random weights, random prompts

fp32 on the CPU. Where the sizes at which this processor's kernels do not depend on the batch were found
(torchtitan/models/layers/batch_invariance.py; `unmet` is empty), all shares are 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random

import common
import torch

from torchtitan.inference.engines.embedded.engine import Engine
from torchtitan.inference.types import GenerateRequest, SamplingParameters
from torchtitan.models.decoder import Decoder
from torchtitan.models.hf_checkpoint import load_policy
from torchtitan.models.layers.attention import PackedLayout
from torchtitan.models.shape.checkpoint_shape import find_flavor
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.rollout.data.rows import arithmetic_rows

BARS: common.Bars = {"share_equal": (">=", 1.0), "share_equal_packs": (">=", 1.0)}
LENGTHS = (5, 33, 100, 250, 420)


def policies(arguments: argparse.Namespace) -> tuple[Decoder, Decoder]:
    """The trainer's and the engine's."""
    if arguments.model:
        return load_policy(arguments.model), load_policy(arguments.model)
    args = dataclasses.replace(find_flavor(*arguments.flavor.split("/")), num_hidden_layers=arguments.layers)
    pair = Decoder(args), Decoder(args)
    for policy in pair:
        policy.initialize_weights(seed=1, std=0.05)
    return pair


def prompts(arguments: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    """Rows of the built-in task for a checkpoint, else random tokens of several lengths."""
    draw = random.Random(0)
    if not arguments.model:
        return [[draw.randrange(vocabulary) for _ in range(length)] for length in LENGTHS]
    tokenizer = Tokenizer(arguments.model)
    return [tokenizer.encode(row["prompt"]) for row in draw.sample(arithmetic_rows(), arguments.prompts)]


@torch.no_grad()
def trainer_log_probs(policy: Decoder, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Log-probs of all tokens but the first, per sequence, in one pack."""
    ids, lengths = torch.tensor([token for row in sequences for token in row]), [len(row) for row in sequences]
    log_probs, _ = policy(ids, PackedLayout(lengths), ids.roll(-1))
    return [part[:-1] for part in log_probs.split(lengths)]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", help="Hugging Face checkpoint directory that was trained on the built-in task")
    parser.add_argument("--flavor", default="qwen3/debug", help="family/size, with random weights")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=505)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.prompts = 20
    torch.set_num_threads(arguments.threads)
    trainer, policy = policies(arguments)
    engine = Engine(policy, 256, max(LENGTHS) + arguments.new_tokens)
    asked = [
        GenerateRequest(str(i), prompt, SamplingParameters(arguments.new_tokens, n=arguments.samples, seed=i))
        for i, prompt in enumerate(prompts(arguments, engine.args.vocab_size))
    ]
    answers = engine.generate(asked)
    pairs = [(request.prompt_ids, done) for request, group in zip(asked, answers, strict=True) for done in group]
    sequences = [prompt + done.token_ids for prompt, done in pairs]
    expected = trainer_log_probs(trainer, sequences)
    half = trainer_log_probs(trainer, sequences[: len(sequences) // 2])
    differences = torch.cat(
        [
            (torch.tensor(done.log_probs) - row[len(prompt) - 1 :]).abs()
            for (prompt, done), row in zip(pairs, expected, strict=True)
        ]
    )
    between_packs = (torch.cat(half) - torch.cat(expected[: len(half)])).abs()
    figures = {
        "tokens": float(len(differences)),
        "share_equal": (differences == 0).double().mean().item(),
        "mean_difference": differences.mean().item(),
        "largest_difference": differences.max().item(),
        "share_equal_packs": (between_packs == 0).double().mean().item(),
    }
    conditions = {
        "model": arguments.model or f"{arguments.flavor}, {arguments.layers} layers, random weights",
        "quick": arguments.quick,
        "threads": arguments.threads,
        "sizes": dataclasses.asdict(engine.sizes),
        "processor": common.processor(),
        "mkl_cbwr": os.environ.get("MKL_CBWR", ""),
    }
    common.report("engine_log_probs", figures, BARS, conditions, arguments.json)


if __name__ == "__main__":
    main()
