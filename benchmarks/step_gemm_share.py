"""What share of a step's forward and backward pass its matrix products would take by themselves.

    python benchmarks/step_gemm_share.py --json

The shape of SmolLM2-135M with random weights, all of them trained, on one thread: prompts of 48 tokens with 16
completions of 16 tokens each, a step of the trainer's own (training.merge_prefixes), without its optimizer, in one
micro-batch. Beside it, torch.mm for every product of the same step at its own shape and dtype: of each linear layer the
output, the gradient of the input and that of the weight; of the head the same for the trained tokens, in fp32, as
products of bfloat16 that are summed in fp32 do not exist on CPUs. Turns are interleaved.

    gemm_share         seconds of these products ÷ seconds of the step's two passes, layers in bfloat16
    gemm_share_fp32    the same in float32
    gflops_*           what the products reach, and what the two passes do (operations of the products ÷ seconds)
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Literal

import common
import torch
from shared_prefix import COMPLETION, make_batch, make_trainer

from torchtitan.models.decoder import Decoder
from torchtitan.models.hf_checkpoint import export_policy
from torchtitan.models.shape.model_args import ModelArgs
from torchtitan.rollout.types import Batch
from torchtitan.utils.machine import keep_freed_memory

PROMPT, GROUP = 48, 16
BARS = {"gemm_share": (">=", 0.7)}
DTYPES: dict[str, Literal["float32", "bfloat16"]] = {"": "bfloat16", "_fp32": "float32"}


def model_args(layers: int) -> ModelArgs:
    return ModelArgs(
        family="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers,
        num_attention_heads=9, num_key_value_heads=3, head_dim=64, tie_word_embeddings=True,
        max_position_embeddings=2048,
    )  # fmt: skip


class Passes:
    """A trainer whose step is timed without its optimizer."""

    def __init__(self, folder: Path, dtype: Literal["float32", "bfloat16"], batch: Batch):
        self.trainer = make_trainer(folder, True, dtype)
        self.batch, self._apart, self._begun, self.computed = batch, 0.0, 0.0, 0
        self.trainer.optimizer.register_step_pre_hook(lambda *_: setattr(self, "_begun", time.perf_counter()))
        self.trainer.optimizer.register_step_post_hook(
            lambda *_: setattr(self, "_apart", time.perf_counter() - self._begun)
        )

    def seconds(self) -> float:
        whole = common.timed(self._step)
        return whole - self._apart

    def _step(self) -> None:
        self.computed = int(self.trainer.train_batch(self.batch).metrics["computed_tokens"] or 0)


def products(
    args: ModelArgs, tokens: int, trained: int, dtype: torch.dtype
) -> list[tuple[int, int, int, int, torch.dtype]]:
    """(how often, rows, inner, columns, dtype) of every product of a step."""
    hidden, inner = args.hidden_size, args.intermediate_size
    heads, kv_heads = args.num_attention_heads * args.head_dim, args.num_key_value_heads * args.head_dim
    layer = [(1, heads, hidden), (2, kv_heads, hidden), (1, hidden, heads), (2, inner, hidden), (1, hidden, inner)]
    found = []
    for count, rows, out, into, kind in [
        *((count * args.num_hidden_layers, tokens, out, into, dtype) for count, out, into in layer),
        (1, trained, args.vocab_size, hidden, torch.float32),
    ]:
        found += [(count, rows, into, out, kind), (count, rows, out, into, kind), (count, out, rows, into, kind)]
    return found


def product_seconds(shapes: list[tuple[int, int, int, int, torch.dtype]]) -> float:
    """Each shape three times, the median counts."""
    total = 0.0
    for count, rows, inner, columns, dtype in shapes:
        left, right = torch.randn(rows, inner, dtype=dtype), torch.randn(inner, columns, dtype=dtype)
        product = partial(torch.mm, left, right, out=torch.empty(rows, columns, dtype=dtype))
        total += count * statistics.median(common.timed(product) for _ in range(3))
    return total


def main() -> None:
    torch.set_num_threads(1)
    parser = common.parser(__doc__)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    layers, prompts, repeats = (2, 1, 1) if arguments.quick else (30, arguments.prompts, arguments.repeats)
    keep_freed_memory()
    args, load, figures = model_args(layers), os.getloadavg()[0], {}
    batch = make_batch(GROUP, prompts, PROMPT, args.vocab_size)
    trained = prompts * GROUP * COMPLETION
    with tempfile.TemporaryDirectory() as name:
        policy = Decoder(args)
        policy.initialize_weights(0)
        export_policy(policy, Path(name))
        del policy
        for suffix, dtype in DTYPES.items():
            passes = Passes(Path(name), dtype, batch)
            passes.seconds()
            shapes = products(args, passes.computed, trained, getattr(torch, dtype))
            seconds = common.interleaved(
                {"step": passes.seconds, "products": partial(product_seconds, shapes)}, repeats
            )
            operations = sum(2.0 * count * rows * inner * columns for count, rows, inner, columns, _ in shapes) / 1e9
            figures[f"gemm_share{suffix}"] = common.median_ratio(seconds["products"], seconds["step"])
            figures |= {
                f"gflops_{who}{suffix}": operations / statistics.median(values) for who, values in seconds.items()
            }
            figures["computed_tokens"] = float(passes.computed)
    conditions = {
        "layers": layers, "load": f"{load:.1f} before, {os.getloadavg()[0]:.1f} after", "threads": 1,
        "processor": common.processor(), "quick": arguments.quick,
    }  # fmt: skip
    common.report("step_gemm_share", figures, BARS, conditions, arguments.json)


if __name__ == "__main__":
    main()
