"""Mixtures of experts: what routing replay is worth, and what the grouped product is.

    python benchmarks/moe.py --json
    python benchmarks/moe.py --json --seeds 3      also three runs of the debug task, with replay and without

replay_kl_ratio: KL(engine ‖ trainer) of the tokens that a bf16 engine has sampled, under an fp32 trainer that routes
for itself, divided by the same with the engine's routes. replayed_share: of the tokens of that batch, those whose
experts the engine has told. grouped_speed: forward and backward of a block with 64 experts, one product for each
expert, against one for all, in processor time of one thread.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

# Read when numpy and torch are first imported.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import common
import torch

from torchtitan.config.job_config import JobConfig
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.inference.embedded.engine import Engine
from torchtitan.inference.trajectory import Branch, Given
from torchtitan.inference.types import GenerateRequest, SamplingParameters
from torchtitan.models import export_policy, load_policy
from torchtitan.models.decoder import Decoder
from torchtitan.models.elementwise import swiglu
from torchtitan.models.expert_args import ExpertArgs
from torchtitan.models.model_args import ModelArgs
from torchtitan.models.moe import MoE, Routing
from torchtitan.preflight.debug_checkpoint import main as make_debug_checkpoint
from torchtitan.rollout.types import Batch, Group, Sample
from torchtitan.trainer.policy_trainer import PolicyTrainer

BARS = {"replay_kl_ratio": (">=", 10.0), "replayed_share": (">=", 1.0), "grouped_speed": (">=", 2.0)}
EXPERTS, PER_TOKEN = 64, 8
VOCABULARY, PROMPT, COMPLETION = 256, 24, 48
# A run has learned when the mean reward of its last batches is so much above that of its first ones.
LEARNED, ENDS = 0.1, 10


def make_model(directory: Path, layers: int) -> None:
    """A random Qwen3-MoE whose weights, unlike a fresh model's, make for clear preferences."""
    args = ModelArgs(
        family="qwen3_moe", vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
        experts=ExpertArgs(EXPERTS, PER_TOKEN, 64, normalize=True),
    )  # fmt: skip
    policy = Decoder(args)
    policy.initialize_weights(0, std=0.15)
    export_policy(policy, directory)


def sampled_batch(directory: Path, prompts: int, samples: int) -> Batch:
    """What a bf16 engine answers, and with which experts."""
    engine = Engine(load_policy(directory, torch.bfloat16), prompts * samples, PROMPT + COMPLETION)
    generator = torch.Generator().manual_seed(0)
    sampling = SamplingParameters(COMPLETION, n=samples, routes=True)
    requests = [
        GenerateRequest(str(number), torch.randint(VOCABULARY, (PROMPT,), generator=generator).tolist(), sampling)
        for number in range(prompts)
    ]
    groups = []
    for number, (request, answers) in enumerate(zip(requests, engine.generate(requests), strict=True)):
        branches = [[Branch([Given(request.prompt_ids), one])] for one in answers]
        rewards = [float(place % 2) for place in range(samples)]
        made = [Sample(one, "length", reward) for one, reward in zip(branches, rewards, strict=True)]
        groups.append(Group(number, made))
    return Batch(0, groups)


def trained(directory: Path, batch: Batch, replay: bool) -> dict[str, float | None]:
    """Figures of one step of an fp32 trainer."""
    config = JobConfig()
    config.model.hf_assets_path, config.grpo.routing_replay = str(directory), replay
    trainer = PolicyTrainer(config, ParallelDims(1, 1, 1, 1))
    return trainer.train_batch(batch).metrics


def by_loop(block: MoE, x: torch.Tensor) -> torch.Tensor:
    """The block with one product per expert."""
    experts, weights = block.gate(x)
    out = torch.zeros_like(x)
    stacks = [getattr(block.experts, name).weight for name in ("gate_proj", "up_proj", "down_proj")]
    for number, (gate, up, down) in enumerate(zip(*(stack.unbind(0) for stack in stacks), strict=True)):
        token, place = torch.where(experts == number)
        rows = x[token]
        made = swiglu(rows @ gate.t(), rows @ up.t()) @ down.t()
        out = out.index_add(0, token, made * weights[token, place, None])
    return out


def grouped_speed(tokens: int, repeats: int) -> float:
    """Processor time of the loop divided by that of the grouped product, taking turns; the median."""
    torch.manual_seed(0)
    block = MoE(ExpertArgs(EXPERTS, 2, 384, normalize=True), 1024, 0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(tokens, 1024, requires_grad=True)
    torch.testing.assert_close(by_loop(block, x), block(x, Routing(None, 1)), rtol=1e-4, atol=1e-5)
    inputs = [x, *block.parameters()]

    def seconds(made: Callable[[], torch.Tensor]) -> float:
        begun = time.process_time()
        torch.autograd.grad(made().sum(), inputs)
        return time.process_time() - begun

    ways = (lambda: by_loop(block, x), lambda: block(x, Routing(None, 1)))
    return statistics.median(seconds(ways[0]) / seconds(ways[1]) for _ in range(repeats))


def learned(folder: Path, seed: int, replay: bool, steps: int) -> float:
    """What the mean reward of the debug task gains in a run whose engine computes in bf16."""
    options = {
        "job.config_file": common.REPOSITORY / "train_configs" / "debug_cpu_moe.toml",
        "job.dump_folder": folder / f"{seed}-{replay}",
        "model.hf_assets_path": folder / "debug_arithmetic_moe",
        "parallelism.expert_parallel_degree": 1,
        "inference.dtype": "bfloat16",
        "grpo.routing_replay": str(replay).lower(),
        "training.steps": steps,
        "training.seed": seed,
        "lr_scheduler.decay_type": "constant",
        "eval.interval": steps,
        "metrics.log_freq": 1,
    }
    rewards = [row["reward/mean"] for row in common.train(options) if "reward/mean" in row]
    return statistics.mean(rewards[-ENDS:]) - statistics.mean(rewards[:ENDS])


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=0, help="runs of the debug task, with replay and without")
    parser.add_argument("--steps", type=int, default=100, help="of such a run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    layers, prompts, tokens, repeats = (2, 2, 256, 1) if arguments.quick else (6, 16, 1024, 9)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", layers)
        batch = sampled_batch(folder / "model", prompts, 8)
        without, replayed = (trained(folder / "model", batch, replay) for replay in (False, True))
        figures["replay_kl_ratio"] = without["mismatch_kl"] / replayed["mismatch_kl"]
        figures |= {"kl_without_replay": without["mismatch_kl"], "kl_with_replay": replayed["mismatch_kl"]}
        figures["replayed_share"] = replayed["routing/replayed_share"]
        figures["grouped_speed"] = grouped_speed(tokens, repeats)
        if arguments.seeds:
            sys.argv = ["debug_checkpoint", "--output", str(folder / "debug_arithmetic_moe")]
            make_debug_checkpoint()
            for replay, said in ((True, "with"), (False, "without")):
                gains = [learned(folder, seed, replay, arguments.steps) for seed in range(arguments.seeds)]
                figures[f"least_gain_{said}_replay"] = min(gains)
                figures[f"learned_{said}_replay"] = sum(gain >= LEARNED for gain in gains)
    conditions = {
        "model": f"Qwen3-MoE, {layers} layers, hidden 128, {PER_TOKEN} of {EXPERTS} experts of 64, random weights",
        "batch": f"{prompts} prompts of {PROMPT} tokens × 8 completions of {COMPLETION}, engine bf16, trainer fp32",
        "block": f"{tokens} tokens, hidden 1024, 2 of {EXPERTS} experts of 384, float32, median of {repeats}",
        "runs": f"{arguments.seeds} of {arguments.steps} steps; learned: reward gained {LEARNED}, engine bf16",
        "processor": common.processor(),
        "torch": torch.__version__,
    }
    common.report("moe", figures, BARS, conditions, arguments.json)


if __name__ == "__main__":
    main()
