"""How evenly packing divides a batch over ranks, against first-fit bins that are cut until all ranks have one.

    python benchmarks/packing.py --json

Groups of 8 completions whose lengths are log-normal (median 200 tokens, sigma 0.5, at most 1,024), behind prompts of
about 120 tokens, 30 of them a system prompt that all share: the lengths of GSM8K, with the budget and the batch of
train_configs/llama3.1_8b_gsm8k_sglang.toml.
Ranks that share parameters wait for the fullest one in every micro-batch, so a step takes the sum of those.

    fill, fill_merged           mean tokens of a rank ÷ tokens of the fullest rank, summed over micro-batches, with
                                whole sequences and with common prefixes once
    first_fit, first_fit_merged the same for the alternative
    speedup_merged              tokens of the fullest ranks, alternative ÷ ours, with common prefixes once
    speedup_few_groups          the same for one group for each rank
    pack_cpu_seconds            processor time to pack 256 completions of 1,024 tokens behind prompts of 512, in groups
                                of 8, for one rank: a batch of train_configs/qwen3_0.6b_1gpu.toml
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from benchmarks import common
from tests.trajectories import single_turn
from torchtitan.config.job_config import JobConfig
from torchtitan.grpo.loss import stage_settings
from torchtitan.inference.types import VersionSpan
from torchtitan.trainer.packing import balanced_bins, balanced_clusters, micro_batches
from torchtitan.trainer.prefixes import clusters, merge

RANKS, BUDGET, GROUPS, EACH, BATCHES = 8, 16384, 32, 8, 20
BARS = {"fill": (">=", 0.95), "fill_merged": (">=", 0.95), "pack_cpu_seconds": ("<=", 0.1)}
Bins = list[list[int]]


def make_batch(rng: np.random.Generator, groups: int) -> list[np.ndarray]:
    numbers = itertools.count()

    def tokens(count: float) -> np.ndarray:
        return np.array(list(itertools.islice(numbers, int(count))), np.uint64)

    system = tokens(30)
    prompts = [np.concatenate((system, tokens(max(20.0, rng.normal(90, 30))))) for _ in range(groups)]
    lengths = rng.lognormal(np.log(200), 0.5, (groups, EACH)).clip(20, 1024)
    return [np.concatenate((prompts[g], tokens(length))) for g in range(groups) for length in lengths[g]]


def first_fit(sizes: list[int], members: Bins) -> Bins:
    """First fit, longest first; then the bins with the most sequences are cut in two until the ranks divide them."""
    bins: Bins = []
    filled: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        place = next((i for i, tokens in enumerate(filled) if tokens + sizes[index] <= BUDGET), len(bins))
        if place == len(bins):
            bins.append([])
            filled.append(0)
        bins[place].append(index)
        filled[place] += sizes[index]
    bins = [sorted(i for member in numbers for i in members[member]) for numbers in bins]
    while len(bins) % RANKS:
        largest = max(range(len(bins)), key=lambda i: len(bins[i]))
        cut, middle = bins[largest], len(bins[largest]) // 2
        bins[largest : largest + 1] = [cut[:middle], cut[middle:]]
    return bins


def loads(sequences: list[np.ndarray], bins: Bins, merged: bool) -> tuple[float, int]:
    """(mean tokens of a rank, tokens of the fullest ranks)."""
    chosen = [[sequences[i] for i in members] for members in bins]
    tokens = [sum(merge(pack).lengths) if merged else sum(map(len, pack)) for pack in chosen]
    return sum(tokens) / RANKS, sum(max(tokens[first : first + RANKS]) for first in range(0, len(tokens), RANKS))


def pack_cpu_seconds() -> float:
    """Processor time of this thread to pack a batch: the least of three times, as the first one is slower."""
    rng, length = random.Random(0), 1024
    samples = []
    for _ in range(32):
        prompt = [rng.randrange(150_000) for _ in range(512)]
        for _ in range(8):
            completion = [rng.randrange(150_000) for _ in range(length)]
            spans = [VersionSpan("e", 3, 0, length)]
            samples.append(single_turn(prompt, completion, [-rng.random() for _ in completion], spans))
    objective, found = stage_settings(JobConfig()).objective, []
    for _ in range(3):
        begin = time.process_time()
        micro_batches(
            samples,
            objective,
            version=3,
            budget=4096,
            max_completion_tokens=length,
            mask_truncated=True,
            rank=0,
            ranks=1,
            device=torch.device("cpu"),
            merged=True,
        )
        found.append(time.process_time() - begin)
    return min(found)


def main() -> None:
    arguments = common.parser(__doc__).parse_args()
    rng = np.random.default_rng(0)
    found: dict[str, list[tuple[float, int]]] = {}
    for _, groups in itertools.product(range(1 if arguments.quick else BATCHES), (GROUPS, RANKS)):
        sequences = make_batch(rng, groups)
        sizes, trained = [len(sequence) for sequence in sequences], [len(sequence) - 120 for sequence in sequences]
        members, of_clusters = clusters(sequences, trained, BUDGET)
        ways = {
            "fill": (balanced_bins(sizes, BUDGET, RANKS), False),
            "fill_merged": (balanced_clusters(sequences, trained, BUDGET, RANKS), True),
            "first_fit": (first_fit(sizes, [[i] for i in range(len(sizes))]), False),
            "first_fit_merged": (first_fit(of_clusters, members), True),
        }
        for name, (bins, merged) in ways.items():
            found.setdefault(name if groups == GROUPS else f"few_{name}", []).append(loads(sequences, bins, merged))
    means, fullest = ({name: sum(column) for name, column in each.items()} for each in (
        {name: [load[place] for load in rows] for name, rows in found.items()} for place in (0, 1)
    ))  # fmt: skip
    figures = {name: means[name] / fullest[name] for name in ("fill", "fill_merged", "first_fit", "first_fit_merged")}
    figures["speedup_merged"] = fullest["first_fit_merged"] / fullest["fill_merged"]
    figures["speedup_few_groups"] = fullest["few_first_fit_merged"] / fullest["few_fill_merged"]
    figures["pack_cpu_seconds"] = pack_cpu_seconds()
    conditions = {
        "quick": arguments.quick,
        "ranks": RANKS,
        "tokens per micro-batch": BUDGET,
        "batches": BATCHES,
        "sequences": GROUPS * EACH,
    }
    common.report("packing", figures, BARS, conditions, arguments.json)


if __name__ == "__main__":
    main()
