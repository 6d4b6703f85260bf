"""An environment of one's own: a second chance for a wrong sum, which is worth half as much.

    python examples/own_environment.py [STEPS]

`reset` gets the row of the dataset, `step` the text of a turn; it returns what the policy reads next, a reward, and
whether the episode is over. Each episode has an instance of its own, in a worker process with limits of time and
memory.
"""

import sys

from torchtitan import train


class SecondChance:
    """Two tries for a sum."""

    def reset(self, answer, **row):
        """Nothing is added to the prompt."""
        self.answer, self.tries = answer, 0

    def step(self, action):
        """(observation, reward, done): a wrong answer is followed by the sign to try again."""
        self.tries += 1
        if action == self.answer:
            return "", 1 / self.tries, True
        return "=", 0.0, self.tries == 2


steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
settings = {"training.steps": steps, "rollout.max_completion_tokens": 12}
run = train("debug_cpu", settings, environment=SecondChance, rewards=[])
print(f"{run.folder}: {run.metrics['reward/mean']:.3f} on average after {run.version} steps")
