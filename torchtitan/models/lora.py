"""Low-rank adapters (Hu et al. 2021): W x becomes W x + alpha / rank · B (A x), where only A and B are trained.

An adapted module stays in place and gets its factors as children, lora_A.weight [rank, in] and lora_B.weight [out,
rank]. The base model's parameters therefore keep their names, and are loaded, exported and sharded as without adapters.
The embedding is treated like any other weight [V, H]: lora_B [V, rank] is looked up, then multiplied by lora_A [rank,
H].

Frozen projections may hold their weights in four bits (QLoRA, Dettmers et al. 2023; adapter_math.py). The forward and
the backward each rebuild the weight; between the two only the four bits exist.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.config.job_config import Lora
from torchtitan.distributed.placement import (
    StackPart,
    copy_full_,
    full_tensor,
    held_part,
    is_distributed,
    local_region,
    local_tensor,
    part_of,
)
from torchtitan.models.adapter_math import (
    ALPHA,
    BASE_BITS,
    FACTOR_A,
    FACTOR_B,
    START,
    dequantize,
    is_factor,
    is_quantized,
    low_rank_product,
    quantize,
)
from torchtitan.models.decoder import Decoder
from torchtitan.models.head.logprob_head import LogProbHead
from torchtitan.models.layers.mixture import ExpertLinear, grouped_linear
from torchtitan.models.shape.checkpoint_shape import BLOCK

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

# These two parameters together represent a weight; neither is usable alone.
HELD = ("packed", "absmax")


class QuantizedLinear(nn.Module):
    """Replaces a frozen linear layer by one of the same shape, device (or meta) and bias, without values yet.

    Its parameters are sharded by rows, like a weight.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        rows, columns = self.shape = linear.weight.shape
        self.dtype = linear.weight.dtype
        """The type of the weight that it represents"""
        device = linear.weight.device
        packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=device)
        absmax = torch.empty(rows, columns // BLOCK, dtype=torch.bfloat16, device=device)
        self.packed, self.absmax = (nn.Parameter(tensor, requires_grad=False) for tensor in (packed, absmax))
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out] in the type of x."""
        return _product(x, self.packed, self.absmax, self.bias)

    def region(self) -> tuple[slice, ...]:
        """The part of the weight that this rank holds, in whole rows."""
        return local_region(self.packed)[0], slice(0, self.shape[1])

    @torch.no_grad()
    def copy_(self, part: torch.Tensor) -> None:
        """Quantise and store this part of the weight, which must be `region`."""
        for parameter, values in zip((self.packed, self.absmax), quantize(part.to(self.device)), strict=True):
            local_tensor(parameter).copy_(values)

    def full_weight(self) -> torch.Tensor:
        """The whole weight in fp32 (a collective where it is sharded)."""
        packed, absmax = (full_tensor(parameter.detach()) for parameter in (self.packed, self.absmax))
        return dequantize(packed, absmax, torch.float32)

    @property
    def device(self) -> torch.device:
        return local_tensor(self.packed).device


# These are operators, not an autograd.Function: of the latter torch.compile makes one graph for forward and backward,
# which may keep the dequantised weight in between.
@torch.library.custom_op("torchtitan::quantized_linear", mutates_args=())
def _product(x: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, dequantize(packed, absmax, x.dtype), bias)


@torch.library.custom_op("torchtitan::quantized_linear_backward", mutates_args=())
def _product_backward(gradient: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    return gradient @ dequantize(packed, absmax, gradient.dtype)


@_product.register_fake
def _(x: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], len(packed))


@_product_backward.register_fake
def _(gradient: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    return gradient.new_empty(*gradient.shape[:-1], 2 * packed.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    return _product_backward(gradient, *ctx.saved_tensors), None, None, None


_product.register_autograd(_backward, setup_context=_keep)


def quantize_projections(policy: nn.Module, trained: Iterable[str]) -> None:
    """Hold weights of all projections but the `trained` ones in four bits. Load them after this, then add adapters."""
    for name, module in list(policy.named_modules()):
        parent, _, module_name = name.rpartition(".")
        if is_quantized(f"{name}.weight") and module_name not in trained:
            assert isinstance(module, nn.Linear)
            setattr(policy.get_submodule(parent), module_name, QuantizedLinear(module))


class Adapter:
    """How a module uses its factors: a forward hook of projections and the embedding; the head calls `pair`."""

    def __init__(self, scale: float, dropout: float):
        self.scale, self.dropout = scale, dropout
        self.enabled = True
        self.prefix = ""
        """Of the factors' names: START selects the frozen copies"""

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        """output + scale · B A x, all of them DTensors if the module is sharded."""
        if not self.enabled:
            return output
        x, (a, b) = inputs[0], self._factors(module)
        if isinstance(module, ExpertLinear):
            reduced = grouped_linear(x, local_tensor(a).to(x.dtype), inputs[1])
            return output + self.scale * grouped_linear(reduced, local_tensor(b).to(x.dtype), inputs[1])
        if isinstance(module, nn.Embedding):
            return output + self.scale * (F.embedding(x, b) @ a).to(output.dtype)
        reduced = F.linear(self._drop(module, x), a.to(x.dtype))
        return output + self.scale * F.linear(reduced, b.to(x.dtype))

    def pair(self, module: nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [N, H] (whole, even under tensor parallelism) -> scale · A hidden [N, rank], and this rank's rows of
        B: another pair of operands for the head."""
        a, b = self._factors(module)
        if is_distributed(a) and is_distributed(b):
            from torch.distributed.tensor import Partial

            # Each rank's gradient covers only its own vocabulary, so they add up.
            a, b = a.to_local(grad_placements=[Partial()]), b.to_local()
        return (self.scale * F.linear(self._drop(module, hidden), a.to(hidden.dtype))).to(b.dtype), b

    def _factors(self, module: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        return module.get_parameter(self.prefix + FACTOR_A), module.get_parameter(self.prefix + FACTOR_B)

    def _drop(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout) if self.dropout and module.training else x


def adapted_modules(policy: nn.Module) -> Iterator[tuple[str, nn.Module, Adapter]]:
    """Yield (name, module, its adapter) of every module that has one."""
    for name, module in policy.named_modules():
        adapter = getattr(module, "adapter", None)
        if isinstance(adapter, Adapter):
            yield name, module, adapter


def add_adapters(policy: Decoder, settings: Lora, keep_start: bool = False) -> None:
    """Add adapters (fp32, without values yet) to the target modules; freeze everything else but modules_to_save.

    Call this after tensor parallelism, whose layout the factors follow, and before anything that wraps forwards.
    keep_start: with a second, frozen pair of factors, for `copy_start_` and `as_begun`.
    """
    for name, module in list(policy.named_modules()):
        if name.rpartition(".")[2] in settings.target_modules:
            _adapt(module, settings, ("", START) if keep_start else ("",))
    for name, parameter in policy.named_parameters():
        owner = name.rpartition(".")[0].rpartition(".")[2]
        trained = is_factor(name) and not owner.startswith(START)
        parameter.requires_grad_(trained or owner in settings.modules_to_save)
    policy.lora = settings


def _adapt(module: nn.Module, settings: Lora, prefixes: Sequence[str]) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    adapter = Adapter(settings.alpha / settings.rank, settings.dropout)
    weight = module if isinstance(module, QuantizedLinear) else module.get_parameter("weight")
    *stack, rows, columns = weight.shape
    placement: Placement = Replicate()
    mesh: DeviceMesh | None = None
    if is_distributed(weight):
        placement, mesh = weight.placements[0], weight.device_mesh
    # Each rank holds whole experts of a stack, and so both of their factors.
    of_a = placement if stack or placement == Shard(1) else Replicate()
    of_b = placement if placement == Shard(0) else Replicate()
    shapes = ("lora_A", (*stack, settings.rank, columns), of_a), ("lora_B", (*stack, rows, settings.rank), of_b)
    for prefix, (name, shape, where) in itertools.product(prefixes, shapes):
        factor, values = nn.Module(), torch.empty(shape, device=weight.device, dtype=torch.float32)
        factor.weight = nn.Parameter(values if mesh is None else distribute_tensor(values, mesh, [where]))
        module.add_module(prefix + name, factor)
    module.adapter = adapter  # type: ignore[assignment]
    if not isinstance(module, LogProbHead):
        # The hook comes first, because tensor parallelism's own hook turns the output into a plain tensor.
        module.register_forward_hook(adapter, prepend=True)


@torch.no_grad()
def initialize_adapters(policy: Decoder, seed: int) -> None:
    """Initialise as in PEFT: A uniform within 1 / sqrt(in) (normal for the embedding), B zero; alike on any layout."""
    generator = torch.Generator().manual_seed(seed)
    for _, module, _ in adapted_modules(policy):
        a = module.get_parameter(FACTOR_A)
        full = torch.empty(a.shape)
        if isinstance(module, nn.Embedding):
            full.normal_(generator=generator)
        else:
            bound = 1 / math.sqrt(a.shape[-1])
            full.uniform_(-bound, bound, generator=generator)
        copy_full_(a, full)
        module.get_parameter(FACTOR_B).zero_()


@torch.no_grad()
def copy_start_(policy: Decoder) -> None:
    """Make the frozen factors of a policy with keep_start what its trained ones are now."""
    for _, module, _ in adapted_modules(policy):
        for factor in (FACTOR_A, FACTOR_B):
            module.get_parameter(START + factor).copy_(module.get_parameter(factor))


@torch.no_grad()
def merged_weight(policy: Decoder, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The whole base-model parameter `name`, with adapters added (a collective if it is sharded). dtype: of the result,
    by default the parameter's own."""
    module_name, _, leaf = name.rpartition(".")
    module = policy.get_submodule(module_name)
    if (buffer := dict(module.named_buffers(recurse=False)).get(leaf)) is not None:
        return buffer.detach().to(dtype or buffer.dtype)
    adapter = getattr(module, "adapter", None) if leaf == "weight" else None
    base: nn.Parameter | QuantizedLinear
    if isinstance(module, QuantizedLinear) and leaf == "weight":
        base, full = module, module.full_weight()
    else:
        base = module.get_parameter(leaf)
        if not isinstance(adapter, Adapter):
            # Rounded first, because ranks send each other less.
            return full_tensor(base.detach().to(dtype or base.dtype))
        full = full_tensor(base.detach())
    if isinstance(adapter, Adapter):
        a, b = (full_tensor(module.get_parameter(factor).detach()) for factor in (FACTOR_A, FACTOR_B))
        full = full + low_rank_product(adapter.scale, a, b)
    return full.to(base.dtype).to(dtype or base.dtype)


def weights(policy: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, tied ones once: everything that a checkpoint holds and an engine needs."""
    return {**dict(policy.named_parameters()), **dict(policy.named_buffers())}


def in_files(policy: Decoder, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | StackPart]:
    """Rename parameters to their names in files and engines; stacks become one item per entry."""
    return {
        part: part_of(tensor, place) for name, tensor in tensors.items() for part, place in policy.names_in_files(name)
    }


def whole_weights(
    policy: Decoder, names: Iterable[str], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name in files, whole tensor) of parameters, adapters merged, gathering one at a time (a collective)."""
    for name in names:
        merged = merged_weight(policy, name, dtype)
        for part, weight in in_files(policy, {name: merged}).items():
            tensor = held_part(weight)[1]
            assert tensor is not None, "it is whole"
            yield part, tensor


def base_parameters(policy: Decoder) -> dict[str, torch.Tensor | QuantizedLinear]:
    """The model's parameters and buffers without adapters; a quantised weight is represented by its module."""
    found: dict[str, torch.Tensor | QuantizedLinear] = {}
    for name, parameter in weights(policy).items():
        module_name, _, leaf = name.rpartition(".")
        module = policy.get_submodule(module_name)
        if isinstance(module, QuantizedLinear) and leaf in HELD:
            found[f"{module_name}.weight"] = module
        elif not is_factor(name):
            found[name] = parameter
    return found


def synced_parameters(policy: Decoder) -> dict[str, torch.Tensor | StackPart]:
    """What actors need of each version, under the names of checkpoint files: all weights, or with adapters the trained
    parameters, alpha and the base's bits.

    alpha is sent as a sum of three numbers, so that bfloat16 represents it exactly.
    """
    if policy.lora is None:
        return in_files(policy, weights(policy))
    trained: dict[str, torch.Tensor] = {n: p for n, p in policy.named_parameters() if p.requires_grad}
    parts, rest = [], policy.lora.alpha
    for _ in range(3):
        parts.append(float(torch.tensor(rest).bfloat16()))
        rest -= parts[-1]
    device = local_tensor(next(iter(trained.values()))).device
    facts = {ALPHA: torch.tensor(parts, device=device)}
    if policy.lora.base_bits != 16:
        facts[BASE_BITS] = torch.tensor([float(policy.lora.base_bits)], device=device)
    return in_files(policy, trained | facts)


def adapters_off(policy: Decoder) -> AbstractContextManager[None]:
    """Run the base model inside the block."""
    return _changed(policy, "enabled", False)


@contextmanager
def as_begun(policy: Decoder) -> Iterator[None]:
    """Run the policy with its frozen factors, without dropout, inside the block."""
    with without_dropout(policy), _changed(policy, "prefix", START):
        yield


def without_dropout(policy: Decoder) -> AbstractContextManager[None]:
    """Turn off the adapters' dropout inside the block."""
    return _changed(policy, "dropout", 0.0)


@contextmanager
def _changed(policy: Decoder, name: str, value: object) -> Iterator[None]:
    before = [(adapter, getattr(adapter, name)) for _, _, adapter in adapted_modules(policy)]
    for adapter, _ in before:
        setattr(adapter, name, value)
    try:
        yield
    finally:
        for adapter, old in before:
            setattr(adapter, name, old)
