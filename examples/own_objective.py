"""An objective of one's own: the loss of a token from its log-probs and its advantage, and that advantage.

    python examples/own_objective.py [STEPS]

In TOML they are named: `[grpo] loss_type = "own_objective:tanh_ratio"`, `advantage = "own_objective:above_the_worst"`.
Off-policy weights, masks, KL and entropy terms are applied outside of them (docs/adding_an_objective.md).
"""

import sys

from torchtitan import train


def tanh_ratio(log_probs, log_ratio, advantages, options):
    """A ratio that saturates at 0 and 2 instead of being clipped. Tensors [n]; returns the loss of each token."""
    return -(1 + log_ratio.tanh()) * advantages


def above_the_worst(rewards, tokens):
    """How much better than half way from the worst to the best of its group. One float64 tensor per group."""
    return [one - (one.min() + one.max()) / 2 for one in rewards]


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    settings = {
        "training.steps": steps,
        # An asynchronous run must bound the weight of an old sample: here the ratio itself is bounded.
        "grpo.allow_uncorrected": True,
    }
    run = train("debug_cpu", settings, loss=tanh_ratio, advantage=above_the_worst)
    print(f"{run.folder}: {run.metrics['reward/mean']:.3f} on average after {run.version} steps")
