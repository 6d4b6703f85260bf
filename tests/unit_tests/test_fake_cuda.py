"""What a GPU runs, on fake tensors of `cuda:3`: whole steps of the recipes, versions that are published, the head.

A value that is asked of the device raises, so that these also show that nothing waits for it but what is listed:
`ExpertExchange.shares` and `ContextParallel.bounds` within a pass, and what follows the reduction of a step's votes.
Operators of ours run inside, too, but for products of quantized weights.
"""

from __future__ import annotations

import ctypes
import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests import fake_cuda
from tests.patience import until
from tests.unit_tests.preflight.test_memory_plan import Peak, even_shares
from torchtitan.config.device_memory import allocator_settings
from torchtitan.config.job_config import JobConfig
from torchtitan.distributed import device
from torchtitan.distributed.collectives import ContextParallel, clip_gradients_, gradient_norm_and_votes
from torchtitan.distributed.offload import OptimizerOffload
from torchtitan.distributed.placement import ParallelDims
from torchtitan.grpo.loss import FixedLogProbs
from torchtitan.models.decoder import Decoder, DecoderLayer
from torchtitan.models.head import fused_head
from torchtitan.models.head.fused_head import WholeRows
from torchtitan.models.head.logit_tiles import KeptTokens
from torchtitan.models.head.logprob_head import fused_log_probs, fused_objective
from torchtitan.models.layers import attention, delta_rule, mixture
from torchtitan.models.layers.attention import PackedAttention, PackedLayout
from torchtitan.models.layers.delta_rule import gradients_in_few_launches, places_of, scan_in_few_launches
from torchtitan.models.layers.elementwise import rotary_tables
from torchtitan.models.layers.forest import Forest, forest_of
from torchtitan.models.parallelize import ExpertExchange, parallelize
from torchtitan.models.shape.checkpoint_shape import read_shape
from torchtitan.models.shape.costs import GPU_HEAD_BYTES, estimate_memory
from torchtitan.preflight import roofline
from torchtitan.preflight.validate import load_config
from torchtitan.trainer.batch_totals import BatchTotals
from torchtitan.trainer.checkpoint import materialize_optimizer, stage
from torchtitan.trainer.packing import MicroBatch
from torchtitan.trainer.policy_trainer import PolicyTrainer
from torchtitan.weight_sync.memory.slots import LiveSlots
from torchtitan.weight_sync.memory.staging import Staging, to_copy
from torchtitan.weight_sync.trainer.publisher import Publisher

pytestmark = [*fake_cuda.marks, pytest.mark.timeout(1800)]
CONFIGS = Path(__file__).resolve().parents[2] / "train_configs"
MEMORY = 0.05
# In the second, all that is kept from one to the next is there, and the last one frees it.
MICRO_BATCHES = 3
# Between host and device, in a micro-batch, however many layers.
BLOCKING_COPIES = 2
STEPS = [
    ("qwen3_0.6b_1gpu", 1, []),
    ("qwen3_0.6b_1gpu", 1, ["--lora.rank", "8"]),
    ("qwen3_0.6b_gsm8k_vllm", 1, []),
    ("llama3.1_8b_gsm8k_sglang", 4, []),
    ("llama3.1_8b_gsm8k_sglang", 4, ["--parallelism.tensor_parallel_degree", "2"]),
    ("qwen2.5_math_7b_colocated", 8, []),
    ("llama3.1_8b_128k_8gpu", 8, []),
    ("qwen3_30b_a3b_8gpu", 8, []),
    ("qwen3_30b_a3b_8gpu", 8, ["--parallelism.expert_parallel_degree", "1"]),
    ("gpt_oss_20b_8gpu", 8, []),
    ("qwen3.5_9b_8gpu", 8, []),
    ("qwen2.5_math_72b_4nodes", 32, []),
]


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fake_cuda.pretend(monkeypatch)
    # The two that have to wait for the device in a pass: here all ranks have the same.
    monkeypatch.setattr(ContextParallel, "bounds", lambda self, rows, tokens: [
        len(rows) * rank // self.ranks for rank in range(self.ranks + 1)
    ])  # fmt: skip
    monkeypatch.setattr(ExpertExchange, "shares", even_shares)
    # Of numbers on the host, which fake tensors would not have.
    monkeypatch.setattr(attention, "forest_of", fake_cuda.without_modes(forest_of))
    monkeypatch.setattr(Forest, "keys", keys_on_device)
    yield
    device.device.cache_clear()


keys_on_host = fake_cuda.without_modes(Forest.keys.__wrapped__)


def keys_on_device(self: Forest, where: torch.device) -> tuple[torch.Tensor, torch.Tensor, int]:
    rows, ends, longest = keys_on_host(self, torch.device("cpu"))
    return torch.empty(rows.shape, dtype=rows.dtype, device=where), torch.empty_like(ends, device=where), longest


INSIDES = {
    "packed_attention": attention._forward,
    "packed_attention_backward": attention._backward,
    "grouped_linear": mixture.grouped_linear._init_fn,
    "grouped_outer": mixture.grouped_outer._init_fn,
    "delta_scan": delta_rule._scan,
    "delta_scan_backward": delta_rule._scan_backward,
}


def make_pack(tokens: int, longest: int, layers: int, per_token: int) -> MicroBatch:
    """A full micro-batch, all of it trained; only its layout has values."""
    whole, rest = divmod(tokens, longest)
    layout = PackedLayout([longest] * whole + [rest] * bool(rest))
    layout.positions, layout.cumulative = layout.positions.to("meta"), layout.cumulative.to("meta")
    numbers, values = torch.empty(tokens, dtype=torch.int64, device="meta"), torch.empty(tokens, device="meta")
    return MicroBatch(
        token_ids=torch.empty(tokens, dtype=torch.int64, device="meta"),
        targets=numbers,
        layout=layout,
        active=numbers,
        sequence=numbers,
        advantages=values,
        behaviour_log_probs=values,
        weights=values,
        same_version=numbers.bool(),
        actors=numbers,
        kept=None,
        trained=[SimpleNamespace(sampled=[SimpleNamespace(token_ids=range(tokens))])],  # type: ignore[list-item]
        num_sequences=len(layout.lengths),
        routes=torch.empty(tokens, layers, per_token, dtype=torch.int16, device="meta") if per_token else None,
    )


def on_cuda(pack: MicroBatch) -> MicroBatch:
    """The same with fake tensors; call it under the mode."""

    def moved(value: Any) -> Any:
        return torch.empty_like(value, device="cuda") if isinstance(value, torch.Tensor) else value

    for container in (pack, pack.layout):
        for name, value in vars(container).items():
            if name != "bounds":  # on the host
                setattr(container, name, moved(value))
    return pack


def traced_step(config: JobConfig, ranks: int, layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Two optimizer steps on rank 0, of one micro-batch and of three; returns the most bytes in the second."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    args = read_shape(config)
    assert args is not None
    args = dataclasses.replace(args, num_hidden_layers=layers)
    dims = ParallelDims.from_config(config.parallelism, ranks, 0)
    # Meshes are made of values, so before the mode begins.
    assert dims.fsdp_mesh.size() * dims.tp_mesh.size() == ranks and dims.expert_mesh.size() == ranks
    if dims.cp > 1:
        assert dims.cp_group is not None
    replayed = args.experts.per_token if args.experts is not None and config.grpo.routing_replay else 0
    pack = make_pack(config.training.tokens_per_micro_batch, config.training.seq_len, layers, replayed)
    peak, resize = Peak(), torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        result = resize(storage, size)
        if storage._cdata in peak._sizes:
            peak.hold(storage)
        return result

    monkeypatch.setattr(torch.UntypedStorage, "resize_", resized)  # FSDP2 frees and takes what it gathers
    peak.counting = False
    assert config.training.dtype == "float32"
    insides = fake_cuda.Insides(INSIDES)
    with FakeTensorMode(allow_non_fake_inputs=True), insides, peak:
        with torch.device("cuda"):
            policy = Decoder(args)
        parallelize(policy, dims, config)
        policy.tie_weights()
        trainer = PolicyTrainer(config, dims, policy.train())
        on_cuda(pack)
        totals = BatchTotals(trainer.device)
        old = torch.empty_like(pack.weights) if config.grpo.recompute_old_log_probs else None
        for counted in (False, True):
            peak.most, peak.counting = 0, counted
            insides.blocking.clear()
            count = MICRO_BATCHES if counted else 1
            loss = trainer._forward_backward([pack] * count, [FixedLogProbs(old)] * count, totals, True, True, True)
            if not counted:
                votes = torch.zeros(3, device="cuda")
                norm, _ = gradient_norm_and_votes(trainer.parameters, votes)
                clip_gradients_(trainer.parameters, norm, 1.0)
                trainer.optimizer.step()
                trainer.optimizer.zero_grad(set_to_none=True)
        assert loss.device == device.device() == torch.device("cuda", fake_cuda.LOCAL_RANK)
    print(f"blocking copies in {MICRO_BATCHES} micro-batches of {layers} layers: {dict(insides.blocking)}")
    assert insides.blocking.total() <= BLOCKING_COPIES * MICRO_BATCHES, insides.blocking
    ran = {name.split(": ")[1] for name in insides.ran}
    assert {"_flash_attention_forward", "_flash_attention_backward"} <= ran
    assert args.experts is None or "_grouped_mm" in ran
    monkeypatch.setattr(torch.UntypedStorage, "resize_", resize)
    return peak.most


@pytest.mark.parametrize(
    ("name", "ranks", "options"), STEPS, ids=lambda value: "_".join(value) if isinstance(value, list) else None
)
def test_a_step_of_the_recipe_waits_for_nothing_and_takes_what_is_planned(
    name: str, ranks: int, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    common = ["--dry-run", "--compile.enable", "false", *options]
    config = load_config(["--job.config_file", str(CONFIGS / f"{name}.toml"), *common])
    args = read_shape(config)
    assert args is not None
    memory = estimate_memory(config, args, ranks)
    step = 4 if args.delta_layers else 2
    few, more = (traced_step(config, ranks, layers, monkeypatch) for layers in (4, 4 + step))
    traced = few + (more - few) / step * (args.num_hidden_layers - 4)
    planned = memory.total - memory.slots - memory.reference - memory.checkpoint
    print(f"{name} {options} on {ranks}: planned {planned:,}, traced {traced:,.0f}, {planned / traced - 1:+.1%}")
    assert planned == pytest.approx(traced, rel=MEMORY)


class Operators(TorchDispatchMode):
    """The names of all operators that ran, and the devices of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[str, set[str]]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        devices = {leaf.device.type for leaf in tree_iter((args, result)) if isinstance(leaf, torch.Tensor)}
        self.ran.append((op.overloadpacket.__name__, devices))
        return result

    def named(self, name: str) -> list[set[str]]:
        return [devices for ran, devices in self.ran if ran == name]


def test_a_version_goes_into_slots_and_staging_on_the_device() -> None:
    shapes = {"weight": (257, 129), "norm": (7,), "scalar": ()}
    with FakeTensorMode(allow_non_fake_inputs=True), Operators() as operators:
        parameters = {name: torch.empty(shape, device="cuda") for name, shape in shapes.items()}
        publisher = Publisher(parameters, rank=0, dtype="bfloat16", num_slots=2, bucket_bytes=1 << 14, on_device=True)
        assert publisher.layout.checksum == "sum"
        publisher.reserve()
        publisher.snapshot(0, 1)
        publisher.fence()
        until(lambda: 1 in LiveSlots(publisher.slots.state_words).filled())
        # One launch casts all parameters into the slot, and nothing passes through the host.
        assert operators.named("_foreach_copy_") == [{"cuda"}] and all("cpu" not in found for _, found in operators.ran)
        staging = Staging(publisher.layout, "cuda")
        loaded = dict(to_copy(staging.tensors))
        assert {name: tuple(tensor.shape) for name, tensor in loaded.items()} == shapes
        assert {(tensor.device.type, tensor.dtype) for tensor in loaded.values()} == {("cuda", torch.bfloat16)}
        staging.bucket((0, 0)).copy_(publisher.memory[0][slice(*publisher.layout.bucket_range(0, 0))])
        publisher.close()
    assert publisher.failure == ""


def test_what_leaves_the_device_in_background_goes_into_pinned_memory_once() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), Operators() as operators:
        parameter = torch.nn.Parameter(torch.empty(5, device="cuda"))
        pinned: dict[str, torch.Tensor] = {}
        first, second = (stage({"model.a": parameter.detach(), "random": torch.empty(2)}, pinned) for _ in range(2))
        assert first["model.a"] is second["model.a"] and first["random"] is not second["random"]
        optimizer = torch.optim.AdamW([parameter])
        OptimizerOffload(optimizer).between_steps()
        # As before a checkpoint is loaded in place: an engine that is built then finds the memory free.
        materialize_optimizer(optimizer)
        for takes_step in (False, True):
            if takes_step:
                parameter.grad = torch.empty_like(parameter)
                optimizer.step()
            assert {tensor.device.type for tensor in optimizer.state[parameter].values() if tensor.dim()} == {"cpu"}
    # Two copies for two saves; two moments that leave twice, and return once.
    assert operators.named("copy_") == [{"cpu", "cuda"}] * 8


# In this order, and of two sizes: a process keeps its settings, and blocks.
@pytest.mark.parametrize(("size", "exact"), [(150_000_000, False), (80_000_000, True)])
def test_pinned_memory_is_as_large_as_it_is_asked_for(size: int, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the next power of two, but where blocks are taken and freed all the time."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    config = JobConfig()
    config.training.enable_cpu_offload = "optimizer" if exact else True
    device.set_allocators(allocator_settings(config))
    held = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    taken = ctypes.c_size_t.in_dll(ctypes.CDLL(None), "last_pinned").value
    assert (taken == len(held)) == exact and taken >= len(held)


@pytest.mark.parametrize("way", ["one pass", "two passes", "softcap", "entropy", "truncated"])
def test_the_head_takes_its_way_on_a_gpu(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of bfloat16, whole rows at a time, and no wait for the device."""
    made: list[int] = []
    peak = Peak()
    monkeypatch.setattr(fused_head, "WholeRows", lambda rows, *rest: made.append(rows) or WholeRows(rows, *rest))
    tokens, hidden, vocabulary = 4096, 1024, 151936
    factor = 0.01 if way == "entropy" else 0.0
    with FakeTensorMode(allow_non_fake_inputs=True), peak, Operators() as operators:
        with torch.device("cuda"):
            states = torch.empty(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
            weight = torch.empty(vocabulary, hidden, dtype=torch.bfloat16, requires_grad=True)
            targets = torch.empty(tokens, dtype=torch.int64)
            offsets, ids = torch.empty(tokens + 1, dtype=torch.int64), torch.empty(2 * tokens, dtype=torch.int64)
        softcap = 30.0 if way == "softcap" else None
        kept = KeptTokens(offsets, ids, [*range(0, 2 * tokens + 1, 2)]) if way == "truncated" else None
        if way == "two passes":
            loss = fused_log_probs(states, weight, targets)[0].sum()
        else:
            loss = fused_objective(
                states, weight, targets, lambda logp, entropy, _: -logp - factor * entropy, softcap=softcap, kept=kept
            )[0]
        loss.backward()
        for operand in (states, weight):
            assert operand.grad is not None and operand.grad.dtype == torch.bfloat16
    assert len(made) == (way != "two passes")
    # Operands and their gradients, the sums of a gradient in fp32; two buffers, and gradients of logits in bfloat16.
    operands = 2 * 2 * (tokens + vocabulary) * hidden + 4 * max(tokens, vocabulary) * hidden
    print(f"{way}: {peak.most:,} bytes, {(peak.most - operands) / GPU_HEAD_BYTES:.2f} buffers")
    assert peak.most <= operands + 3 * GPU_HEAD_BYTES
    # Three products for each tile, or four where logits are computed twice.
    products = operators.named("mm") + operators.named("addmm")
    assert len(products) % (4 if way == "two passes" else 3) == 0 and all(product == {"cuda"} for product in products)


def test_the_scan_of_a_recurrent_layer_takes_few_launches_and_waits_for_nothing() -> None:
    """A pack of 16,384 tokens of Qwen3.5-9B. Step by step, four sequences of 4,096 take more than 600 launches."""
    chunks, heads, tokens, size = 16384 // 64 + 5, 32, 64, 128
    with FakeTensorMode(allow_non_fake_inputs=True), Operators() as operators:
        with torch.device("cuda"):
            new, read, key = (torch.empty(chunks, heads, tokens, size) for _ in range(3))
            decay, first = torch.empty(chunks, heads), torch.empty(5, dtype=torch.int64)
        made = len(operators.ran)
        states = scan_in_few_launches(new, read, key, decay, None, first)
        gradients_in_few_launches(torch.empty_like(states), read, key, decay)
    assert states.shape == (chunks, heads, size, size)
    ran = [(name, devices) for name, devices in operators.ran[made:] if name not in Work.VIEWS]
    assert len(ran) < 150 and all(devices <= {"cuda"} for _, devices in ran)


def launches(config: JobConfig, index: int) -> int:
    """What one layer takes for a full micro-batch, forward and backward, in half precision and without FSDP2. What lies
    inside of our operators counts, views do not."""
    args, tokens = read_shape(config), config.training.tokens_per_micro_batch
    assert args is not None
    pack = make_pack(tokens, config.training.seq_len, 0, 0)
    insides = fake_cuda.Insides(INSIDES)
    with torch.device("meta"):
        layer = DecoderLayer(args, index).bfloat16()
    with FakeTensorMode(allow_non_fake_inputs=True), insides, Operators() as operators:
        layer.to_empty(device="cuda")
        with torch.device("cuda"):
            x = torch.empty(tokens, args.hidden_size, dtype=torch.bfloat16, requires_grad=True)
            positions = torch.empty(tokens, dtype=torch.int64)
        attend = PackedAttention(on_cuda(pack).layout)
        attend.places = places_of(attend.cumulative, tokens)
        rotary = rotary_tables(args, positions, x.dtype)[0]
        gradient, before = torch.empty_like(x), len(operators.ran)
        layer(x, rotary, attend).backward(gradient)
        assert all(p.grad is not None for p in (x, *layer.parameters()))
    outside = Counter(name for name, _ in operators.ran[before:] if name not in INSIDES)
    inside = Counter({name.split(": ")[1]: count for name, count in insides.ran.items()})
    # Inside, what is made of other operators is seen as well; what is reshaped there is contiguous.
    nothing = Work.VIEWS | {"promote_types", "mT", "flatten", "reshape"}
    ran = Counter({name: count for name, count in (outside + inside).items() if name not in nothing})
    print(f"layer {index}: {ran.total()} launches: {dict(ran)}")
    return ran.total()


def test_a_recurrent_layer_takes_less_than_three_times_the_launches_of_attention() -> None:
    config = load_config(["--job.config_file", str(CONFIGS / "qwen3.5_9b_8gpu.toml"), "--dry-run"])
    args = read_shape(config)
    assert args is not None and 0 in args.delta_layers and 3 not in args.delta_layers
    recurrent, attending = launches(config, 0), launches(config, 3)
    assert recurrent <= 2.7 * attending, (recurrent, attending)


class Work(Peak):
    """Counts what the operators of the second step's micro-batches compute, read and write, and send."""

    VIEWS = {
        *("t", "transpose", "view", "_unsafe_view", "slice", "select", "detach", "expand", "unsqueeze", "squeeze"),
        *("alias", "as_strided", "split", "split_with_sizes", "unbind", "permute", "_reshape_alias", "unfold", "chunk"),
        *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "lift_fresh", "is_same_size"),
        *("device", "wait_tensor"),
    }
    OF_A_ROW = {"gather", "scatter_add_"}  # one element of each
    # Of a table they read the rows that they return, and these write all of what they change, without reading it.
    OF_A_TABLE = {"embedding", "index_select"}
    FILL = {"copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_"}
    NEW = {"new_zeros", "zeros_like", "ones_like", "new_ones", "new_full", "full_like"}

    def __init__(self) -> None:
        super().__init__()
        self.done: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(op, types, args, kwargs)
        name = op.overloadpacket.__name__
        if result is NotImplemented or not self.counting or name in self.VIEWS | self.OF_A_ROW:
            return result
        operands = [operand for operand in args if isinstance(operand, torch.Tensor)]
        if op.namespace in ("c10d", "_c10d_functional"):
            sizes = [_bytes([leaf]) for leaf in tree_iter((args, kwargs, result))]
            self.done["alltoall" if "alltoall" in name else "collectives"] += max(sizes, default=0)
        elif name in ("mm", "addmm"):
            first, second = operands[-2:]
            self.done["products"] += 2 * first.shape[0] * first.shape[1] * second.shape[1]
        elif name == "grouped_linear" or name == "grouped_outer":
            self.done["experts"] += 2 * operands[0].numel() * operands[1].shape[1]
        elif not name.startswith("packed_attention"):
            self.done["elementwise"] += self.moved(op, args, kwargs or {}, result)
        return result

    def moved(self, op: Any, args: Any, kwargs: Any, result: Any) -> int:
        """Bytes that an operator reads, and those that it writes."""
        name = op.overloadpacket.__name__
        if name == "all_gather_copy_in":
            return 2 * _bytes(args[0])  # into this rank's part of the second one
        given = zip(op._schema.arguments, args, strict=False)
        named = {argument.name: value for argument, value in given} | kwargs
        changed = [named[entry.name] for entry in op._schema.arguments if entry.alias_info and entry.name in named]
        if name in self.OF_A_TABLE:
            return 2 * _bytes(result)
        if name in self.NEW:
            return _bytes(result)
        if name.startswith("_embedding_bag") and "backward" not in name:
            return len(args[1]) * args[0].shape[1] * args[0].element_size() + _bytes(result[0])
        filled = changed if name in self.FILL else named.get("out", [])
        changed_ids = {id(leaf) for leaf in tree_iter(changed)}
        made = [leaf for leaf in tree_iter(result) if id(leaf) not in changed_ids]
        return _bytes((args, kwargs)) - _bytes(filled) + _bytes(changed) + _bytes(made)


def _bytes(of: Any) -> int:
    tensors = {id(leaf): leaf for leaf in tree_iter(of) if isinstance(leaf, torch.Tensor) and leaf.is_cuda}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@pytest.mark.parametrize(
    ("name", "ranks", "options"),
    [
        ("llama3.1_8b_gsm8k_sglang", 8, []),
        ("llama3.1_8b_gsm8k_sglang", 8, ["--activation_checkpoint.mode", "full"]),
        ("llama3.1_8b_gsm8k_sglang", 8, ["--activation_checkpoint.mode", "op"]),
        ("qwen2.5_math_7b_colocated", 8, []),
        ("qwen3_0.6b_1gpu", 1, []),
        ("qwen3_30b_a3b_8gpu", 8, []),
        ("gpt_oss_20b_8gpu", 8, []),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else None,
)
def test_the_roofline_counts_what_is_traced(
    name: str, ranks: int, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    common = ["--dry-run", "--compile.enable", "false", "--grpo.recompute_old_log_probs", "false", *options]
    config = load_config(["--job.config_file", str(CONFIGS / f"{name}.toml"), *common])
    args, works = read_shape(config), list[Work]()
    assert args is not None
    monkeypatch.setattr(sys.modules[__name__], "Peak", lambda: works.append(Work()) or works[-1])
    args, tokens = (
        dataclasses.replace(args, num_hidden_layers=4),
        config.training.tokens_per_micro_batch * MICRO_BATCHES,
    )
    traced_step(config, ranks, 4, monkeypatch)
    done, planned = works[0].done, roofline.count(config, args, ranks, tokens, MICRO_BATCHES, config.training.seq_len)
    of_optimizer = 40 * args.num_parameters() / ranks
    pairs = {
        "products": (planned.products, done["products"]),
        "experts": (planned.experts, done["experts"]),
        "elementwise": (planned.elementwise - of_optimizer, done["elementwise"]),
        "overlapped": (planned.overlapped, done["collectives"]),
        # A rank's own rows are among them.
        "waited for": (planned.waited_for, done["alltoall"] * (1 - 1 / ranks)),
    }
    for part, (formula, traced) in pairs.items():
        print(f"{name} {options} {part}: {formula:.4g} planned, {traced:.4g} traced")
    for part, (formula, traced) in pairs.items():
        assert formula == pytest.approx(traced, rel=0.1), part
