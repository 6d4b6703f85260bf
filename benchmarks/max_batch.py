"""The largest training batch within a limit of resident memory, fused head against full logits.

    python benchmarks/max_batch.py --json

A Qwen3 shape of 100 M parameters with vocabulary 151,936, 512 tokens per sequence, one micro-batch; weights, gradients
and AdamW state in fp32. Full logits are those of the same decoder, then log_softmax and gather, without entropy.
Every trial is a process of its own that trains and reports its peak of resident memory; peaks at two sizes predict
the largest batch, which is then tried, and so is the next.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import common

LENGTH = 512
MIB = 1 << 20
TRIAL_SECONDS = 1200


def trial(head: str, batch: int) -> float:
    """Peak of resident memory in MiB over two training steps with `batch` sequences."""
    variables = {"MALLOC_MMAP_THRESHOLD_": str(1 << 17), "TORCHTITAN_DEVICE": "cpu"}
    command = [sys.executable, __file__, "--worker", head, batch]
    peak = float(common.run(command, TRIAL_SECONDS, **variables).strip().splitlines()[-1])
    common.progress(f"{head}: {batch} sequences, {peak:.0f} MiB")
    return peak


def work(head: str, batch: int) -> float:
    """What a trial runs."""
    import torch

    from torchtitan.models.decoder import Decoder
    from torchtitan.models.layers.attention import PackedLayout
    from torchtitan.models.shape.model_args import ModelArgs

    args = ModelArgs(
        family="qwen3",
        vocab_size=151936,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=7,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
    )
    policy = Decoder(args)
    policy.initialize_weights(seed=0)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    # The first step, a small one, makes the optimizer's state.
    for sequences in (1, batch):
        layout = PackedLayout([LENGTH] * sequences)
        tokens = torch.randint(0, args.vocab_size, (LENGTH * sequences,))
        targets, advantages = tokens.roll(-1), torch.randn(LENGTH * sequences)

        def objective(
            log_probs: torch.Tensor, _: torch.Tensor, rows: slice, by: torch.Tensor = advantages
        ) -> torch.Tensor:
            return -by[rows] * log_probs / len(by)

        if head == "fused":
            loss, _, _ = policy(tokens, layout, targets, objective=objective)
        else:
            log_probs = torch.log_softmax(policy(tokens, layout), -1).gather(-1, targets[:, None]).squeeze(-1)
            loss = objective(log_probs, log_probs, slice(None)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) / 1024


def largest(head: str, limit: float, first: int, second: int) -> tuple[int, float]:
    """The largest batch that stays below the limit, and its peak: by a line through the last two trials, until the next
    larger one was tried and does not fit."""
    last, peaks = (first, second), {batch: trial(head, batch) for batch in (first, second)}
    while True:
        fits = max((batch for batch, peak in peaks.items() if peak <= limit), default=0)
        too_large = min((batch for batch, peak in peaks.items() if peak > limit), default=None)
        if too_large == fits + 1:
            return fits, peaks[fits]
        slope = (peaks[last[1]] - peaks[last[0]]) / (last[1] - last[0])
        guess = int((limit - peaks[last[1]]) / slope) + last[1]
        guess = max(fits + 1, guess if too_large is None else min(guess, too_large - 1))
        peaks[guess] = trial(head, guess)
        last = (fits or first, guess) if guess != fits else last


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        print(json.dumps(work(sys.argv[2], int(sys.argv[3]))))
        return
    parser = common.parser(__doc__)
    parser.add_argument("--limit-gib", type=float, default=8.0, help="resident memory")
    arguments = parser.parse_args()
    limit = (4.5 if arguments.quick else arguments.limit_gib) * 1024
    full, full_peak = largest("full", limit, 1, 3)
    fused, fused_peak = largest("fused", limit, 2, 4)
    common.report(
        "max_batch",
        {
            "batch_ratio": fused / full,
            "largest_fused": fused,
            "largest_full": full,
            "fused_peak_mib": fused_peak,
            "full_peak_mib": full_peak,
        },
        {"batch_ratio": (">=", 1.8)},
        {"limit_gib": limit / 1024, "tokens_per_sequence": LENGTH, "vocabulary": 151936, "parameters": "100 M, tied"},
        arguments.json,
    )


if __name__ == "__main__":
    main()
