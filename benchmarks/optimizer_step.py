"""What a step of Muon and of AdamW8bit costs against AdamW's, on two ranks that share the parameters (FSDP2).

    python benchmarks/optimizer_step.py --json

A Qwen3 of 27 million parameters in fp32 on CPUs (gloo, a thread per rank); 2,048 tokens per rank and step.

    muon_vs_adamw         optimizer step of Muon ÷ of AdamW (median over the turns of one run)
    muon_vs_adamw_step    the same with forward and backward
    eight_bit_vs_adamw    optimizer step of AdamW8bit ÷ of AdamW, if bitsandbytes is installed
    muon_two_ranks        Muon's optimizer step on two ranks ÷ on one
    muon_memory_vs_plan   a rank's peak in Muon's step above what it held before, ÷ what --dry-run says
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import common

RUN_SECONDS = 1800
NAMES = ["AdamW", "Muon", *(["AdamW8bit"] if find_spec("bitsandbytes") else [])]


def work(folder: Path, quick: bool) -> None:
    """A rank. Rank 0's seconds, by optimizer and turn, go to <ranks>.json."""
    import torch

    from torchtitan.config.job_config import Comm, JobConfig
    from torchtitan.distributed import device
    from torchtitan.distributed.collectives import all_reduce_sum
    from torchtitan.distributed.placement import ParallelDims
    from torchtitan.models.layers.attention import PackedLayout
    from torchtitan.models.parallelize import build_policy
    from torchtitan.models.shape.costs import muon_bytes
    from torchtitan.trainer.optimizer import build_optimizer

    torch.set_num_threads(1)
    device.init_process_group(Comm(train_timeout_seconds=RUN_SECONDS))
    config = JobConfig()
    config.model.hf_assets_path = str(folder / "model")
    policy = build_policy(config, ParallelDims(1, device.world_size(), 1, device.world_size(), device.rank()))
    ids = torch.randint(policy.args.vocab_size, (128 if quick else 2048,))

    def forward_backward() -> None:
        policy.zero_grad()
        policy(ids, PackedLayout([128] * (len(ids) // 128)), ids.roll(-1))[0].mean().backward()

    optimizers = {}
    for name in NAMES:
        config.optimizer.name = name  # type: ignore[assignment]
        optimizers[name] = build_optimizer(policy, config.optimizer)

    def once(name: str) -> float:
        all_reduce_sum(torch.ones(1))  # ranks begin together
        return common.timed(optimizers[name].step)

    forward_backward()
    once("Muon")
    peak = common.peak_mib(lambda: once("Muon"))
    config.optimizer.name = "Muon"
    planned = muon_bytes(config, policy.args, device.world_size()) / 2**20
    result = {
        "memory": peak / planned,
        "seconds": common.interleaved({name: lambda name=name: once(name) for name in NAMES}, 2 if quick else 5),
        "forward_backward": [common.timed(forward_backward) for _ in range(1 if quick else 2)],
    }
    if device.rank() == 0:
        (folder / f"{device.world_size()}.json").write_text(json.dumps(result))
    device.shutdown()


def make_model(folder: Path, quick: bool) -> int:
    """Returns its parameters."""
    from torchtitan.models.decoder import Decoder
    from torchtitan.models.hf_checkpoint import export_policy
    from torchtitan.models.shape.model_args import ModelArgs

    hidden = 64 if quick else 512
    args = ModelArgs(
        family="qwen3", vocab_size=8192, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=4, head_dim=hidden // 8, max_position_embeddings=512,
    )  # fmt: skip
    policy = Decoder(args)
    policy.initialize_weights(0)
    export_policy(policy, folder)
    return args.num_parameters()


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        work(Path(sys.argv[2]), sys.argv[3] == "quick")
        return
    arguments = common.parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = make_model(folder / "model", arguments.quick)
        launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        for ranks in (1, 2):
            words = [*launched, ranks, __file__, "--worker", folder, "quick" if arguments.quick else "whole"]
            common.run(words, RUN_SECONDS, TORCHTITAN_DEVICE="cpu")
        single, two = (json.loads((folder / f"{ranks}.json").read_text()) for ranks in (1, 2))
    seconds, rest = two["seconds"], min(two["forward_backward"])
    with_rest = {name: [duration + rest for duration in times] for name, times in seconds.items()}
    figures = {
        "muon_vs_adamw": common.median_ratio(seconds["Muon"], seconds["AdamW"]),
        "muon_vs_adamw_step": common.median_ratio(with_rest["Muon"], with_rest["AdamW"]),
        "muon_two_ranks": min(seconds["Muon"]) / min(single["seconds"]["Muon"]),
        "muon_memory_vs_plan": two["memory"],
        "forward_backward_s": rest,
    }
    if "AdamW8bit" in seconds:
        figures["eight_bit_vs_adamw"] = common.median_ratio(seconds["AdamW8bit"], seconds["AdamW"])
    figures |= {f"{name.lower()}_s": min(times) for name, times in seconds.items()}
    bars = {"muon_memory_vs_plan": ("<=", 1.0)}
    conditions = {"parameters": parameters, "processor": common.processor(), "quick": arguments.quick}
    common.report("optimizer_step", figures, bars, conditions, arguments.json)


if __name__ == "__main__":
    main()
