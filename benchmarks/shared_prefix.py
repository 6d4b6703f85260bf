"""What a step costs when the trainer computes common prefixes once, against whole sequences, in one run.

    python benchmarks/shared_prefix.py --json

A Qwen3 of 6 layers in fp32 on one thread. Two prompts of 64 tokens with G completions of 16 tokens each; and two
episodes of an agent with 12 turns, whose history is rewritten after each turn: the 16 tokens of reasoning of every
action are left out later, so that each turn is a sequence of its own. A step is the trainer's own, from the batch to
the optimizer, in one micro-batch; turns are interleaved. The peak is the resident memory above what was held before a
step, gradients included, in a process of its own.

    speedup_*             seconds of a step with whole sequences ÷ with common prefixes once (median over the turns)
    peak_ratio_*          peak with common prefixes once ÷ with whole sequences
    computed_*, whole_*   tokens that each of the two computes
    gradient_difference   ‖difference‖ / ‖gradient of whole sequences‖, the largest of all cases
"""

from __future__ import annotations

import functools
import json
import math
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Literal

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import common
import torch

from torchtitan.config.job_config import JobConfig
from torchtitan.distributed.placement import ParallelDims
from torchtitan.inference.types import Branch, Completion, Given, VersionSpan
from torchtitan.models.decoder import Decoder
from torchtitan.models.hf_checkpoint import export_policy
from torchtitan.models.shape.model_args import ModelArgs
from torchtitan.rollout.types import Batch, Group, Sample
from torchtitan.trainer.policy_trainer import PolicyTrainer
from torchtitan.utils.machine import keep_freed_memory

VOCABULARY, HIDDEN, QUICK_HIDDEN = 4096, 256, 32
PROMPTS, PROMPT, COMPLETION = 2, 64, 16
EPISODES, TURNS, OBSERVATION, REASONING, ACTION = 2, 12, 32, 16, 8
CASES = {"g8": 8, "g16": 16, "g32": 32, "episode": 0}
RUN_SECONDS = 1800
# Big blocks come straight from the system and go back to it, so that the peak is of live memory.
VARIABLES = {"MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
BARS = {"speedup_g16": (">=", 2.5), "gradient_difference": ("<=", 1e-6), "peak_ratio_g16": ("<=", 0.6)}


def make_model(folder: Path, hidden: int) -> None:
    args = ModelArgs(
        family="qwen3", vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=hidden // 4, max_position_embeddings=1024,
    )  # fmt: skip
    policy = Decoder(args)
    policy.initialize_weights(0)
    export_policy(policy, folder)


def make_batch(samples: int, prompts: int = PROMPTS, length: int = PROMPT, vocabulary: int = VOCABULARY) -> Batch:
    """Prompts of this length with so many completions each, or, for 0, episodes."""
    rng = random.Random(samples)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(count)]

    def sampled(ids: list[int]) -> Completion:
        # Random weights know as good as nothing.
        nothing = -math.log(vocabulary)
        log_probs = [rng.uniform(nothing - 0.2, nothing + 0.2) for _ in ids]
        return Completion(ids, log_probs, "stop", [VersionSpan("e", 0, 0, len(ids))])

    def episode(task: list[int]) -> list[Branch]:
        history, branches = list(task), []
        for _ in range(TURNS):
            history += tokens(OBSERVATION)
            reasoning, action = tokens(REASONING), tokens(ACTION)
            branches.append(Branch([Given(list(history)), sampled(reasoning + action)]))
            history += action
        return branches

    groups = []
    for number in range(prompts if samples else 1):
        prompt = tokens(length)
        made = [[Branch([Given(prompt), sampled(tokens(COMPLETION))])] for _ in range(samples)]
        made = made or [episode(prompt) for _ in range(EPISODES)]
        groups.append(Group(number, [Sample(branches, "stop", rng.random(), {}) for branches in made]))
    return Batch(0, groups)


def make_trainer(folder: Path, merged: bool, dtype: Literal["float32", "bfloat16"] = "float32") -> PolicyTrainer:
    """Its weights stay as they are, so that all its gradients of a batch are the same. dtype: of what it computes."""
    config = JobConfig()
    config.model.hf_assets_path, config.training.mixed_precision_param = str(folder), dtype
    config.training.tokens_per_micro_batch = 1 << 20
    config.training.max_norm = config.optimizer.lr = 0.0
    config.rollout.max_completion_tokens = REASONING + ACTION
    return PolicyTrainer(config, ParallelDims(1, 1, 1, world_size=1), merges_prefixes=merged)


def gradient(trainer: PolicyTrainer, batch: Batch) -> tuple[torch.Tensor, float]:
    """The whole gradient of a step in double precision, and the tokens that it computed."""
    found: list[torch.Tensor] = []
    handle = trainer.optimizer.register_step_pre_hook(
        lambda *_: found.extend(param.grad.double().flatten() for param in trainer.parameters if param.grad is not None)
    )
    computed = trainer.train_batch(batch).metrics["computed_tokens"]
    handle.remove()
    return torch.cat(found), float(computed or 0.0)


def peaks(folder: Path) -> dict[str, dict[str, float]]:
    """MiB by case and way."""
    found: dict[str, dict[str, float]] = {}
    for name, samples in CASES.items():
        found[name] = {}
        for way in ("once", "whole"):
            trainer, batch = make_trainer(folder, way == "once"), make_batch(samples)
            trainer.train_batch(batch)  # what is made once
            found[name][way] = common.peak_mib(lambda trainer=trainer, batch=batch: trainer.train_batch(batch))
    return found


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--worker"]:
        print(json.dumps(peaks(Path(sys.argv[2]))))
        return
    parser = common.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    keep_freed_memory()
    load = os.getloadavg()[0]
    figures: dict[str, float] = {}
    differences, rows = [], {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, QUICK_HIDDEN if arguments.quick else HIDDEN)
        output = common.run([sys.executable, __file__, "--worker", folder], RUN_SECONDS, **VARIABLES)
        found = json.loads(output.strip().splitlines()[-1])
        trainers = {"once": make_trainer(folder, True), "whole": make_trainer(folder, False)}
    for case, samples in CASES.items():
        batch = make_batch(samples)
        (once, computed), (whole, all_tokens) = (gradient(trainer, batch) for trainer in trainers.values())
        differences.append(((once - whole).norm() / whole.norm()).item())
        seconds = common.interleaved(
            {way: functools.partial(common.timed, functools.partial(trainer.train_batch, batch))
             for way, trainer in trainers.items()},
            1 if arguments.quick else arguments.repeats,
        )  # fmt: skip
        rows[case] = {way: [round(value, 3) for value in values] for way, values in seconds.items()}
        figures |= {
            f"speedup_{case}": common.median_ratio(seconds["whole"], seconds["once"]),
            f"peak_ratio_{case}": found[case]["once"] / found[case]["whole"],
            f"peak_mib_{case}": found[case]["once"],
            f"computed_{case}": computed,
            f"whole_{case}": all_tokens,
        }
        common.progress(f"{case}: {figures[f'speedup_{case}']:.2f} times as fast")
    figures["gradient_difference"] = max(differences)
    conditions = {
        "seconds": rows, "load": f"{load:.1f} before, {os.getloadavg()[0]:.1f} after", "threads": 1,
        "processor": common.processor(), "quick": arguments.quick,
    }  # fmt: skip
    common.report("shared_prefix", figures, BARS, conditions, arguments.json)


if __name__ == "__main__":
    main()
