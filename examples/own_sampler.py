"""A curriculum of one's own: which prompts are drawn more often, from how their groups were rewarded so far.

    python examples/own_sampler.py [STEPS]

In TOML: `sampler = "own_sampler:half_solved"` in [rollout] (docs/sources.md).
"""

import sys

from torchtitan import train


def half_solved(means, variances, groups, typical):
    """Prompts of which about half is solved, and those that are not known. Arrays [prompts]; returns their weights."""
    return means * (1 - means).clip(0) + (groups < 0.1)


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    run = train("debug_cpu", {"training.steps": steps}, sampler=half_solved)
    seen = run.metrics.get("curriculum/seen_fraction", 0.0)
    print(f"{run.folder}: {seen:.0%} of the prompts have been drawn after {run.version} steps")
