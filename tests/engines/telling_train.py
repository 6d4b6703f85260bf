"""torchtitan.grpo_train, which says at its end on how many threads torch has computed."""

from __future__ import annotations

import torch

from torchtitan.grpo_train import main
from torchtitan.utils.machine import leave

if __name__ == "__main__":
    code = main()
    print(f"threads of torch: {torch.get_num_threads()}", flush=True)
    leave(code)
