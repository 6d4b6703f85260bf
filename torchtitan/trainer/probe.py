"""The text whose log-probs the trainer and all actors have to agree on; see inference/parity.py."""

from __future__ import annotations

from torchtitan.config.derived import verification
from torchtitan.config.job_config import JobConfig
from torchtitan.rollout.tokenizer import Tokenizer

# Ordinary text, as models are certain of much of it: rounding is small where log-probs are.
TEXT = (
    "12+34=46. A train travels 60 miles in 2 hours, so its average speed is 60/2=30 miles per hour. "
    "What is 7*8-6? First 7*8=56, then 56-6=50."
)
MOST_TOKENS = 64
LEAST_TOKENS = 8


def probe_tokens(config: JobConfig, vocabulary: int) -> list[int]:
    """Token ids of the probe, the same on every rank; empty where nothing is probed."""
    if verification(config) != "probe" or config.rollout.replay:
        return []
    limit = max(2, min(MOST_TOKENS, config.training.seq_len - 1))
    tokens = Tokenizer(config.model.hf_assets_path).encode(TEXT)[:limit]
    if len(tokens) < min(LEAST_TOKENS, limit):
        tokens = [(7 * place + 3) % vocabulary for place in range(limit)]
    return tokens
