"""Mixtures of experts: what routing replay is worth, and what the grouped product is.

    python benchmarks/moe.py --json
    python benchmarks/moe.py --json --seeds 3      also six runs of the debug task, three with replay, three without

replay_kl_ratio: KL(engine ‖ trainer) of the tokens that a bf16 engine has sampled, under an fp32 trainer that routes
for itself, divided by the same with the engine's routes. replayed_share: of the tokens of that batch, those whose
experts the engine has told. grouped_speed: forward and backward of a block with 64 experts, in processor time of one
thread, against the loop over experts that transformers' own block has (experts_implementation eager), at 4,096 tokens,
the least of a micro-batch in the recipes for GPUs. Also, at each size: the same against a loop that takes the stacks
apart once, one over experts with parameters of their own, and transformers' grouped product.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

# Read when numpy and torch are first imported.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import common
import torch
import torch.nn.functional as F

from torchtitan.config.job_config import JobConfig
from torchtitan.distributed.placement import ParallelDims
from torchtitan.inference.engines.embedded.engine import Engine
from torchtitan.inference.types import Branch, GenerateRequest, Given, SamplingParameters
from torchtitan.models.decoder import Decoder
from torchtitan.models.hf_checkpoint import export_policy, load_policy
from torchtitan.models.layers.mixture import MoE, Routing
from torchtitan.models.shape.mixture_args import ExpertArgs
from torchtitan.models.shape.model_args import ModelArgs
from torchtitan.rollout.types import Batch, Group, Sample
from torchtitan.trainer.policy_trainer import PolicyTrainer
from torchtitan.utils.json_lines import read_json_lines

BARS = {"replay_kl_ratio": (">=", 10.0), "replayed_share": (">=", 1.0), "grouped_speed": (">=", 2.0)}
EXPERTS, PER_TOKEN, WIDE = 64, 8, 1024
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


def by_loop(block: MoE, stacks: Sequence[Iterable[torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
    """The block with one product per expert; stacks: gate, up and down of every expert."""
    experts, weights = block.gate(x)
    out = torch.zeros_like(x)
    for number, (gate, up, down) in enumerate(zip(*stacks, strict=True)):
        token, place = torch.where(experts == number)
        rows = x[token]
        made = F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), down)
        out.index_add_(0, token, made * weights[token, place, None])
    return out


def transformers_block(block: MoE, implementation: str) -> torch.nn.Module:
    """transformers' own block with the same weights."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=WIDE, num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=384, norm_topk_prob=True
    )
    config._experts_implementation = implementation
    made, experts = Qwen3MoeSparseMoeBlock(config), block.experts
    stacks = {
        "gate.weight": block.gate.weight,
        "experts.gate_up_proj": torch.cat((experts.gate_proj.weight, experts.up_proj.weight), 1),
        "experts.down_proj": experts.down_proj.weight,
    }
    made.load_state_dict(stacks)
    return made


def grouped_speed(tokens: int, repeats: int) -> dict[str, float]:
    """Processor time of other ways to compute a block divided by that of ours, taking turns; the medians."""
    torch.manual_seed(0)
    block = MoE(ExpertArgs(EXPERTS, 2, 384, normalize=True), WIDE, 0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(tokens, WIDE, requires_grad=True)
    whole = [getattr(block.experts, name).weight for name in ("gate_proj", "up_proj", "down_proj")]
    apart = [[torch.nn.Parameter(one.detach().clone()) for one in stack] for stack in whole]
    eager, grouped = (transformers_block(block, name) for name in ("eager", "grouped_mm"))
    ways: dict[str, tuple[Callable[[], torch.Tensor], Iterable[torch.Tensor]]] = {
        "ours": (lambda: block(x, Routing(None, 1)), block.parameters()),
        "transformers_loop": (lambda: eager(x[None])[0], eager.parameters()),
        "transformers_grouped": (lambda: grouped(x[None])[0], grouped.parameters()),
        "loop_over_stacks": (lambda: by_loop(block, [stack.unbind(0) for stack in whole], x), block.parameters()),
        "loop_over_parameters": (
            lambda: by_loop(block, apart, x), [block.gate.weight, *itertools.chain(*apart)],
        ),
    }  # fmt: skip
    ways = {name: (compute, [x, *inputs]) for name, (compute, inputs) in ways.items()}
    expected = ways["ours"][0]().detach()

    def seconds(name: str) -> float:
        compute, inputs = ways[name]
        begun = time.process_time()
        made = compute()
        torch.autograd.grad(made.sum(), inputs)
        taken = time.process_time() - begun
        torch.testing.assert_close(made.view_as(x), expected, rtol=1e-4, atol=1e-5)
        return taken

    taken = common.interleaved({name: functools.partial(seconds, name) for name in ways}, repeats)
    figures = {f"{name}_{tokens}": common.median_ratio(taken[name], taken["ours"]) for name in ways if name != "ours"}
    return {f"seconds_{tokens}": statistics.median(taken["ours"])} | figures


def run_figures(folder: Path, seed: int, replay: bool, steps: int) -> dict[str, float]:
    """Gain in mean reward, first and last pass@1 and mean KL of a run of the debug task whose engine computes in bf16.
    A run that the folder already holds is not repeated."""
    name = f"{seed}-{replay}-{steps}"
    options = {
        "job.config_file": common.REPOSITORY / "train_configs" / "debug_cpu_moe.toml",
        "job.dump_folder": folder / name,
        "parallelism.expert_parallel_degree": 1,
        "inference.dtype": "bfloat16",
        "grpo.routing_replay": str(replay).lower(),
        "training.steps": steps,
        "training.seed": seed,
        "lr_scheduler.decay_type": "constant",
        "eval.interval": steps,
        "metrics.log_freq": 1,
    }
    common.once(folder / f"{name}.json", options, lambda: f"{len(common.train(options))} rows of metrics")
    rows = read_json_lines(folder / name / "latest" / "metrics.jsonl")
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    gain = statistics.mean(rewards[-ENDS:]) - statistics.mean(rewards[:ENDS])
    passes = [row["eval/pass@1"] for row in rows if "eval/pass@1" in row]
    kl = statistics.mean(row["mismatch_kl"] for row in rows if "mismatch_kl" in row)
    return {"gain": gain, "pass_at_start": passes[0], "pass_at_end": passes[-1], "mismatch_kl": kl}


def seed_figures(folder: Path, seeds: int, steps: int) -> dict[str, float]:
    """Runs of the debug task, with replay and without: how many of them learn, and what each of them reaches."""
    figures: dict[str, float] = {}
    for seed, (replay, said) in itertools.product(range(seeds), ((True, "with"), (False, "without"))):
        made = run_figures(folder, seed, replay, steps)
        common.progress(f"seed {seed} {said} replay: {made}")
        figures |= {f"{key}_{said}_{seed}": value for key, value in made.items()}
        learned = f"learned_{said}_replay"
        figures[learned] = figures.get(learned, 0) + (made["gain"] >= LEARNED)
    return figures


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=0, help="runs of the debug task, with replay and without")
    parser.add_argument("--steps", type=int, default=200, help="of such a run")
    parser.add_argument("--runs", type=Path, default=Path("outputs/moe"), help="where they go; finished ones are kept")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    layers, prompts, sizes, repeats = (2, 2, (64,), 1) if arguments.quick else (6, 16, (256, 1024, 4096), 5)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", layers)
        batch = sampled_batch(folder / "model", prompts, 8)
        without, replayed = (trained(folder / "model", batch, replay) for replay in (False, True))
        figures["replay_kl_ratio"] = without["mismatch_kl"] / replayed["mismatch_kl"]
        figures |= {"kl_without_replay": without["mismatch_kl"], "kl_with_replay": replayed["mismatch_kl"]}
        figures["replayed_share"] = replayed["routing/replayed_share"]
        for tokens in sizes:
            figures |= grouped_speed(tokens, repeats)
        figures["grouped_speed"] = figures[f"transformers_loop_{sizes[-1]}"]
    if arguments.seeds:
        figures |= seed_figures(arguments.runs, arguments.seeds, arguments.steps)
    conditions = {
        "model": f"Qwen3-MoE, {layers} layers, hidden 128, {PER_TOKEN} of {EXPERTS} experts of 64, random weights",
        "batch": f"{prompts} prompts of {PROMPT} tokens × 8 completions of {COMPLETION}, engine bf16, trainer fp32",
        "block": f"hidden {WIDE}, 2 of {EXPERTS} experts of 384, float32, medians of {repeats}; tokens: {sizes}",
        "runs": f"{arguments.seeds} of {arguments.steps} steps; learned: reward gained {LEARNED}, engine bf16",
        "processor": common.processor(),
        "torch": torch.__version__,
    }
    common.report("moe", figures, BARS, conditions, arguments.json)


if __name__ == "__main__":
    main()
