"""One long sequence on one rank and on two with context parallelism: memory of activations, and that results are equal.

    python benchmarks/long_context.py --json

A tiny Qwen3 in fp32 on CPUs, one sequence of 32,768 tokens. The peak is that of a rank's resident memory from the
forward to the end of the backward, above what it held before, gradients included (a few MiB at this width).
cp_exact is the largest difference of a token's log-prob, gradient_ratio that of a gradient's elements to its largest.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import common

TOKENS, QUICK_TOKENS = 32768, 1024
RUN_SECONDS = 1800


def work(tokens: int, folder: Path) -> None:
    """A rank: one forward and backward; its peak goes to peak<rank>.json, rank 0's results to <ranks>.pt."""
    import torch

    from torchtitan.config.job_config import Comm, JobConfig
    from torchtitan.distributed import device
    from torchtitan.distributed.placement import ParallelDims, full_tensor
    from torchtitan.models.layers.attention import PackedLayout
    from torchtitan.models.parallelize import build_policy

    torch.set_num_threads(1)
    device.init_process_group(Comm(init_timeout_seconds=300, train_timeout_seconds=RUN_SECONDS))
    config = JobConfig()
    config.model.name, config.model.flavor = "qwen3", "debug"
    config.parallelism.context_parallel_degree = device.world_size()
    dims = ParallelDims.from_config(config.parallelism, device.world_size(), device.rank())
    policy = build_policy(config, dims)
    generator = torch.Generator().manual_seed(0)

    def step(length: int) -> torch.Tensor:
        ids = torch.randint(0, policy.args.vocab_size, (length,), generator=generator)
        log_probs, _ = policy(ids, PackedLayout([length]), ids.roll(-1))
        log_probs.mean().backward()
        return log_probs.detach()

    # What is made once: sizes that kernels like, buffers of collectives.
    step(64)
    policy.zero_grad()
    found: list[torch.Tensor] = []
    peak = common.peak_mib(lambda: found.append(step(tokens)))
    (folder / f"{dims.cp}-{device.rank()}.json").write_text(json.dumps(peak))
    gradients = {
        name: full_tensor(parameter.grad.detach())
        for name, parameter in policy.named_parameters()
        if parameter.grad is not None
    }
    if device.rank() == 0:
        torch.save({"log_probs": found[0], "gradients": gradients}, folder / f"{dims.cp}.pt")
    device.shutdown()


def run(ranks: int, tokens: int, folder: Path) -> float:
    """The largest peak of the ranks, in MiB."""
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    common.run([*launched, __file__, "--worker", tokens, folder], RUN_SECONDS, TORCHTITAN_DEVICE="cpu")
    peaks = [float(path.read_text()) for path in folder.glob(f"{ranks}-*.json")]
    common.progress(f"{ranks} rank(s): peak {max(peaks):.0f} MiB")
    return max(peaks)


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        work(int(sys.argv[2]), Path(sys.argv[3]))
        return
    arguments = common.parser(__doc__).parse_args()
    tokens = QUICK_TOKENS if arguments.quick else TOKENS
    import torch

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone, shared = run(1, tokens, folder), run(2, tokens, folder)
        one, two = (torch.load(folder / f"{ranks}.pt", weights_only=True) for ranks in (1, 2))
    exact = float((one["log_probs"] - two["log_probs"]).abs().max())
    pairs = [(value, two["gradients"][key]) for key, value in one["gradients"].items()]
    gradient = max(float((value - other).abs().max() / value.abs().max()) for value, other in pairs)
    common.report(
        "long_context",
        {
            "cp2_memory_ratio": shared / alone,
            "cp_exact": exact,
            "gradient_ratio": gradient,
            "peak_mib_1": alone,
            "peak_mib_2": shared,
        },
        {"cp2_memory_ratio": ("<=", 0.6), "cp_exact": ("<=", 2e-6)},
        {"tokens": tokens, "processor": common.processor()},
        arguments.json,
    )


if __name__ == "__main__":
    main()
