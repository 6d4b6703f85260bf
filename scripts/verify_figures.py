"""Figures of a run on a GPU beside what the plan expects, for scripts/verify_gpu.py: one line each, with a bar.

    python scripts/verify_figures.py FOLDER [--mfu 0.2] [--used FILE]     of the run whose folder this is
    python scripts/verify_figures.py --make FOLDER [--flavor 0.6B]        makes a Qwen3 of random weights to train

- peak_over_plan: what torch had allocated at the peak of the last step ÷ what the plan counts on the GPU meanwhile
- reserved_over_allocated: what torch's allocator had taken from the GPU ÷ that
- mfu: of the last step, on GPUs whose peak is known
- used_over_plan: the most memory in use of any GPU (--used: a file of MiB, a line per sample) ÷ what the plan counts
  there while the engine generates, which is the larger half of a step
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torchtitan.config.reading import read_command_line
from torchtitan.inference.placement import GIB, beside_generation, colocated_memory, device_bytes_of_driver
from torchtitan.models.shape.checkpoint_shape import find_flavor, read_shape
from torchtitan.models.shape.costs import estimate_memory, on_device
from torchtitan.preflight.validate import validated
from torchtitan.utils.json_lines import read_json_lines
from torchtitan.utils.ranks import world_size

# An estimate that is exceeded by more does not help to plan.
MOST_OVER_PLAN, MOST_RESERVED = 1.15, 1.15


def figures(folder: Path, least_mfu: float, used: Path | None) -> Iterator[tuple[str, float, str, float]]:
    """Yield (figure, measured, relation, bar)."""
    config = validated(read_command_line(["--job.config_file", str(folder / "config.toml")])[0], planning=True)
    args, ranks = read_shape(config), world_size()
    if args is None:
        raise SystemExit(f"{folder}: its model is gone")
    last = [line for line in read_json_lines(folder / "metrics.jsonl") if "memory/device_peak_gib" in line][-1]
    memory = estimate_memory(config, args, ranks)
    peak = last["memory/device_peak_gib"]
    yield "peak_over_plan", peak * GIB / on_device(config, memory), "<=", MOST_OVER_PLAN
    yield "reserved_over_allocated", last["memory/device_reserved_gib"] / peak, "<=", MOST_RESERVED
    # Of a GPU whose peak is not known (utils/cards.py), there is none.
    if least_mfu and "mfu" in last:
        yield "mfu", last["mfu"], ">=", least_mfu
    if used is not None and (config.is_colocated or config.shares_devices):
        engine = colocated_memory(config, ranks, device_bytes_of_driver())
        assert engine is not None
        planned = max(beside_generation(config, memory) + engine.total, on_device(config, memory)) + engine.stays
        taken = max(int(line) for line in used.read_text().split() if line.isdigit())
        yield "used_over_plan", taken * 2**20 / planned, "<=", 1.0


def make_model(folder: Path, flavor: str) -> None:
    """Write a Qwen3 of this size with random weights and the debug tokenizer."""
    import torch
    from make_debug_checkpoint import write_tokenizer

    from torchtitan.models.decoder import Decoder
    from torchtitan.models.hf_checkpoint import export_policy

    policy = Decoder(find_flavor("qwen3", flavor))
    policy.initialize_weights(0)
    export_policy(policy, folder, dtype=torch.bfloat16)
    write_tokenizer(folder)


def main() -> int:
    """Returns the exit code: 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--make", action="store_true")
    parser.add_argument("--flavor", default="0.6B")
    parser.add_argument("--mfu", type=float, default=0.0)
    parser.add_argument("--used", type=Path)
    arguments = parser.parse_args()
    if arguments.make:
        make_model(arguments.folder, arguments.flavor)
        return 0
    missed = 0
    for key, measured, relation, bar in figures(arguments.folder, arguments.mfu, arguments.used):
        met = measured <= bar if relation == "<=" else measured >= bar
        missed += not met
        print(f"{key} {measured:.3f} {relation} {bar:g} {'met' if met else 'MISSED'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
