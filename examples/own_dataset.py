"""Rows of one's own: prompts made by Python, with the answer in a column that the reward function sees.

    python examples/own_dataset.py [STEPS]

The answers of the built-in task are written backwards, so that the carry runs from left to right.
"""

import sys

from torchtitan import train


def sums_below_a_hundred():
    """Two numbers of two digits whose sum has two as well."""
    pairs = ((a, b) for a in range(10, 90) for b in range(10, 100 - a))
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)[::-1]} for a, b in pairs]


steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
run = train("debug_cpu", {"training.steps": steps}, dataset=sums_below_a_hundred, rewards="arithmetic")
print(f"{run.folder}: pass@1 is {run.metrics['eval/pass@1']:.3f} on held-out rows after {run.version} steps")
