"""A reward function of one's own beside a built-in one.

    python examples/own_reward.py [STEPS]

It has TRL's call convention: lists in, one number per completion out. It runs in worker processes with limits of time
and memory, so a slow or broken one costs its samples their reward and never the run.
"""

import sys

from torchtitan import train


def short(completions, **kwargs):
    """A tenth of a point for an answer of at most three characters."""
    return [0.1 * (len(text) <= 3) for text in completions]


steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
run = train("debug_cpu", {"training.steps": steps}, rewards=["arithmetic", short])
print(f"{run.folder}: {run.metrics['reward/mean']:.3f} on average after {run.version} steps")
