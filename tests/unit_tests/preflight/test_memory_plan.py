"""The plan's memory against a step that is traced: fake ranks, tensors without data, every allocation counted."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from torchtitan.config.job_config import JobConfig
from torchtitan.distributed import device
from torchtitan.distributed.collectives import ContextParallel
from torchtitan.distributed.placement import ParallelDims
from torchtitan.models.decoder import Decoder
from torchtitan.models.head import fused_head, logit_tiles, logprob_head
from torchtitan.models.layers import attention
from torchtitan.models.layers.attention import PackedLayout
from torchtitan.models.parallelize import ExpertExchange, before_micro_batch, parallelize
from torchtitan.models.shape.checkpoint_shape import read_shape
from torchtitan.models.shape.costs import estimate_memory
from torchtitan.preflight.validate import load_config
from torchtitan.trainer.optimizer import build_optimizer
from torchtitan.utils.dtypes import DTYPES

CONFIGS = Path(__file__).resolve().parents[3] / "train_configs"


class Peak(TorchDispatchMode):
    """Bytes of all tensors that live, and the most that there were while `counting`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.counting = True
        self._sizes: dict[int, int] = {}

    def hold(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            weakref.finalize(storage, self._gone, key)
        self.now += storage.size() - self._sizes.get(key, 0)
        self._sizes[key] = storage.size()
        if self.counting:
            self.most = max(self.most, self.now)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its parts come by
        result = op(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor):
                self.hold(leaf.untyped_storage())
        return result


def even_shares(self: ExpertExchange, counts: torch.Tensor, coming: torch.Tensor, rows: int) -> list[list[int]]:
    """Every rank gets as many rows as every other."""
    return [[rows // self.ranks] * self.ranks] * 2


@pytest.fixture
def gpu_paths(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is decided by the device is decided as for a GPU; tensors without data are the CPU's."""
    monkeypatch.setenv("TORCHTITAN_DEVICE", "cpu")
    device.device.cache_clear()
    device.device()
    for module in (fused_head, logit_tiles, logprob_head):
        monkeypatch.setattr(module, "on_gpu", lambda tensor: True)
    for module in (device, logprob_head):
        monkeypatch.setattr(module, "matmul_converts", lambda tensor: False)
    monkeypatch.setattr(logprob_head, "check_targets", lambda *_: None)
    monkeypatch.setattr(attention, "uses_varlen_flash", lambda *_, **__: True)
    # Tensors without data cannot say which rank has what: all have the same.
    monkeypatch.setattr(ContextParallel, "bounds", lambda self, rows, tokens: [
        len(rows) * rank // self.ranks for rank in range(self.ranks + 1)
    ])  # fmt: skip
    monkeypatch.setattr(ExpertExchange, "shares", even_shares)
    monkeypatch.setenv("TORCHTITAN_DEVICE", "cuda")
    yield
    device.device.cache_clear()


def traced_peak(config: JobConfig, ranks: int, layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most bytes on rank 0 in a step's second micro-batch, with the optimizer's state there."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    args = read_shape(config)
    assert args is not None
    with torch.device("meta"):
        policy = Decoder(dataclasses.replace(args, num_hidden_layers=layers)).to(DTYPES[config.training.dtype])
    parallelize(policy, ParallelDims.from_config(config.parallelism, ranks, 0), config)
    tokens = config.training.tokens_per_micro_batch
    whole, rest = divmod(tokens, config.training.seq_len)
    layout = PackedLayout([config.training.seq_len] * whole + [rest] * bool(rest))
    peak, resize = Peak(), torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        result = resize(storage, size)
        if storage._cdata in peak._sizes:
            peak.hold(storage)
        return result

    monkeypatch.setattr(torch.UntypedStorage, "resize_", resized)  # FSDP2 frees and takes what it gathers
    with FakeTensorMode(allow_non_fake_inputs=True), peak:
        policy.to_empty(device="cpu")
        policy.tie_weights()
        optimizer = build_optimizer(policy, config.optimizer)
        ids, rows = torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens)
        # Not counted: how DTensor finds out what an operator does is in full size, and costs no memory.
        for parameter in policy.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        for _micro_batch in range(2):
            peak.most = 0
            before_micro_batch(policy, last=False)
            loss = policy(ids, layout, ids, rows=rows, objective=lambda log_probs, entropy, part: -log_probs)[0]
            loss.backward()
    monkeypatch.setattr(torch.UntypedStorage, "resize_", resize)
    return peak.most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("qwen3_0.6b_1gpu", 1),
        ("qwen3_0.6b_gsm8k_vllm", 1),
        ("llama3.1_8b_gsm8k_sglang", 4),
        ("qwen2.5_math_7b_colocated", 8),
        ("llama3.1_8b_128k_8gpu", 8),
        ("qwen3_30b_a3b_8gpu", 8),
        ("gpt_oss_20b_8gpu", 8),
        ("qwen3.5_9b_8gpu", 8),
        ("qwen2.5_math_72b_4nodes", 32),
        ("qwen2.5_math_72b_4nodes", 256),
    ],
)
def test_planned_memory_is_that_of_a_traced_step(
    name: str, ranks: int, gpu_paths: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    # What is compiled cannot be traced; the plan does not tell the two apart.
    options = ["--dry-run", "--compile.enable", "false"]
    config = load_config(["--job.config_file", str(CONFIGS / f"{name}.toml"), *options])
    args = read_shape(config)
    assert args is not None
    memory = estimate_memory(config, args, ranks)
    # Layers are alike, so that memory grows in a straight line once there are enough that no other moment takes more.
    # With a Gated DeltaNet, every fourth layer has attention.
    step = 4 if args.delta_layers else 2
    few, more = (traced_peak(config, ranks, layers, monkeypatch) for layers in (4, 4 + step))
    traced = few + (more - few) / step * (args.num_hidden_layers - 4)
    print(f"{name} on {ranks}: planned {memory.total - memory.slots - memory.checkpoint:,}, traced {traced:,.0f}")
    assert memory.total - memory.slots - memory.checkpoint == pytest.approx(traced, rel=0.15)
