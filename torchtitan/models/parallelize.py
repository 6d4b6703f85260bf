"""From a decoder on the meta device to this rank's trainable policy: TP → EP → adapters → compile → AC → FSDP2.

The experts of a mixture are distributed over `ep`, and the rows or columns of each over `efsdp`. Under tensor
parallelism the tokens are already divided among the ranks within layers (sequence parallelism): each rank routes its
own, and experts are not cut any further. Hence `efsdp` × `ep` are the ranks of dp_shard × tp.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from torchtitan.config.job_config import ActivationCheckpoint, JobConfig
from torchtitan.config.optimizer_step import keeps_unsharded_params
from torchtitan.config.teachers import keeps_initial_adapters
from torchtitan.distributed.collectives import ContextParallel
from torchtitan.distributed.device import device
from torchtitan.distributed.placement import ParallelDims, local_region
from torchtitan.models.decoder import Decoder
from torchtitan.models.head.logprob_head import VocabularyPart
from torchtitan.models.hf_checkpoint import load_adapter, load_into
from torchtitan.models.layers.attention import PackedAttention
from torchtitan.models.layers.elementwise import RotaryTables
from torchtitan.models.layers.gated_delta import GatedDeltaNet, HeadShard
from torchtitan.models.layers.mixture import MoE, Routing
from torchtitan.models.lora import add_adapters, copy_start_, initialize_adapters, quantize_projections
from torchtitan.models.shape.checkpoint_shape import ForeignArgs, read_shape
from torchtitan.models.shape.costs import SELECTED
from torchtitan.models.shape.model_args import ModelArgs
from torchtitan.utils.dtypes import DTYPES


def mixtures(policy: Decoder) -> list[MoE]:
    """The layers' mixtures of experts."""
    return [layer.mlp for layer in policy.model.layers if isinstance(layer.mlp, MoE)]


def mixture_plan(plan: dict[str, ParallelStyle], mixture: MoE) -> dict[str, ParallelStyle]:
    """Turn a dense layer's tensor-parallel plan into one for a layer with this mixture: tokens stay divided, except for
    shared experts, which are cut like a dense feed-forward."""
    result = {name: style for name, style in plan.items() if not name.startswith("mlp")}
    if mixture.shared_experts is not None:
        result |= {n.replace("mlp", "mlp.shared_experts"): s for n, s in plan.items() if n.startswith("mlp")}
    if mixture.shared_expert_gate is not None:
        result["mlp.shared_expert_gate"] = SharedTokens(mixture)
    return result | {
        "mlp": PrepareModuleInput(
            input_layouts=(Shard(0), None), desired_input_layouts=(Shard(0), None), use_local_output=True
        ),
        "mlp.gate": SharedTokens(mixture),
    }


ATTENTION = [
    torch.ops.torchtitan.packed_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


class SharedTokens(ParallelStyle):
    """Each rank routes its part of the pack; the router's weight is replicated."""

    def __init__(self, mixture: MoE):
        self._mixture = mixture

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._mixture.part, self._mixture.parts = device_mesh.get_local_rank(), device_mesh.size()
        weight = module.get_parameter("weight").detach()
        module.register_parameter("weight", nn.Parameter(distribute_tensor(weight, device_mesh, [Replicate()])))
        return module


class HeadParallel(ParallelStyle):
    """Divides the heads of a GatedDeltaNet, apart from its projections and its norm."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, GatedDeltaNet)
        module.shard = HeadShard(device_mesh, module.sizes)
        ranks = device_mesh.size()
        heads = {name: getattr(module.sizes, name) // ranks for name in ("key_heads", "value_heads")}
        module.sizes = dataclasses.replace(module.sizes, **heads)
        for owner, name, where in (
            (module, "A_log", Shard(0)),
            (module, "dt_bias", Shard(0)),
            (module.conv1d, "weight", Replicate()),
        ):
            values = distribute_tensor(owner.get_parameter(name).detach(), device_mesh, [where])
            owner.register_parameter(name, nn.Parameter(values))
        return module


class _AllToAll(torch.autograd.Function):
    """rows [R, H] -> rows [R', H]: sends sent[i] of them to rank i, receives received[i]; gradients go back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        got = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(got, rows.contiguous(), received, sent, group=group)
        return got

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _AllToAll.apply(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


class ExpertExchange:
    """Sends rows to the ranks of their experts; rank r of n holds experts r · E / n to (r + 1) · E / n.

    A collective of the mesh, in forward and backward: its ranks must run the same number of micro-batches.
    """

    def __init__(self, mesh: DeviceMesh):
        self._group, self.ranks = mesh.get_group(), mesh.size()

    def __call__(
        self, rows: torch.Tensor, counts: torch.Tensor, compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """rows [R, H] in the order of their experts, and each expert's count [E] -> the results of compute, per row.

        compute(rows [R', H], their experts [R'] relative to this rank's first) -> a tensor like rows.
        """
        per_rank = len(counts) // self.ranks
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=self._group)
        sent, received = self.shares(counts, coming, len(rows))
        expert = torch.arange(per_rank, device=rows.device).repeat(self.ranks)
        # Without the size, it would wait for the device a second time.
        expert = expert.repeat_interleave(coming, output_size=sum(received))
        arrived = _AllToAll.apply(rows, sent, received, self._group)
        back: torch.Tensor = _AllToAll.apply(compute(arrived, expert), received, sent, self._group)
        return back

    def shares(self, counts: torch.Tensor, coming: torch.Tensor, rows: int) -> tuple[list[int], list[int]]:
        """Of `rows` rows, how many go to each rank, and how many come from each. A layer's only wait for the device."""
        sent, received = torch.stack((counts, coming)).view(2, self.ranks, -1).sum(-1).tolist()
        return sent, received


def apply_expert_parallelism(policy: Decoder, dims: ParallelDims, compiled: bool) -> None:
    """Give each rank of `ep` its share of the experts, whose number `ep` divides. compiled: layers will be compiled,
    and the exchange stays outside the graph."""
    for mixture in mixtures(policy):
        experts = mixture.experts
        for module in experts.modules():
            for name, stack in list(module.named_parameters(recurse=False)):
                part = distribute_tensor(stack.detach(), dims.expert_mesh["ep"], [Shard(0)])
                module.register_parameter(name, nn.Parameter(part))
        exchange = ExpertExchange(dims.expert_mesh["ep"])
        experts.exchange = torch.compiler.disable(exchange.__call__) if compiled else exchange


def _experts_mesh(dims: ParallelDims) -> DeviceMesh:
    return dims.expert_mesh[("dp_replicate", "efsdp") if dims.dp_replicate > 1 else ("efsdp",)]


def shard_experts(policy: Decoder, dims: ParallelDims, reshard: bool, options: dict[str, Any]) -> None:
    """Apply FSDP2 to the experts separately, over the ranks that hold the same experts and process other tokens."""
    # Ranks divide whole experts, or rows under expert parallelism, to keep this sharding apart from that of ep.
    where = Shard(0) if dims.ep == 1 else Shard(1)
    for mixture in mixtures(policy):
        fully_shard(
            mixture.experts,
            reshard_after_forward=reshard,
            shard_placement_fn=lambda _: where,
            **{**options, "mesh": _experts_mesh(dims)},
        )


def build_policy(config: JobConfig, dims: ParallelDims) -> Decoder:
    """Build the policy of `config`, laid out according to `dims`, with its weights, in training mode.

    Weights come from model.hf_assets_path; with a model.flavor and no safetensors there, they are random
    (training.seed). Low-rank adapters come from lora.adapter_path, or start without an effect. A collective: every rank
    calls it. Raises UserError if the checkpoint does not fit.
    """
    directory = config.model.hf_assets_path
    args = read_shape(config)
    policy = _make(args).to(DTYPES[config.training.dtype])
    parallelize(policy, dims, config)
    policy.to_empty(device="cpu" if config.training.enable_cpu_offload is True else device())
    # to_empty gave the embedding and the head separate tensors.
    policy.tie_weights()
    if config.model.flavor and not (directory and any(Path(directory).glob("*.safetensors"))):
        policy.initialize_weights(config.training.seed)
    else:
        load_into(policy, directory)
    if config.lora.rank and config.lora.adapter_path:
        load_adapter(policy, config.lora.adapter_path)
        if keeps_initial_adapters(config):
            copy_start_(policy)
    elif config.lora.rank:
        initialize_adapters(policy, config.training.seed)
    policy.train()
    if isinstance(args, ForeignArgs):
        from torchtitan.models.transformers_policy import TransformersPolicy, check_packing

        assert isinstance(policy, TransformersPolicy)
        check_packing(
            policy, 0.001 if config.training.mixed_precision_param == config.training.dtype == "float32" else 0.1
        )
    return policy


def _make(args: ModelArgs) -> Decoder:
    """Make the policy without weights."""
    if isinstance(args, ForeignArgs):
        # transformers is an optional extra, and slow to import.
        from torchtitan.models.transformers_policy import TransformersPolicy

        return TransformersPolicy(args)
    with torch.device("meta"):
        return Decoder(args)


def parallelize(policy: Decoder, dims: ParallelDims, config: JobConfig) -> None:
    """Apply tensor parallelism, quantisation, adapters, compilation, activation checkpointing and FSDP2 in place to a
    policy on meta.

    Call `to_empty` and `tie_weights` and load weights afterwards. Gradients are summed, not averaged, over
    data-parallel ranks.
    """
    training = config.training
    if dims.cp > 1:
        policy.context = ContextParallel(dims.cp_group)
    if dims.tp > 1:
        apply_tensor_parallelism(policy, dims.tp_mesh)
    if dims.ep > 1:
        apply_expert_parallelism(policy, dims, compiled=config.compile.enable)
    if config.lora.base_bits == 4:
        quantize_projections(policy, config.lora.modules_to_save)
    if config.lora.rank:
        add_adapters(policy, config.lora, keeps_initial_adapters(config))
    if config.compile.enable:
        for layer in policy.layers:
            # A mixture's exchange of tokens stays outside the graph.
            is_one_graph = not isinstance(layer.mlp, MoE)
            _replace_forward(layer, _compiled(layer.forward, config.compile.backend, is_one_graph))
    if config.activation_checkpoint.mode != "none":
        # Checkpointing wraps compiled layers, because the compiler only accepts the layer's own function.
        apply_activation_checkpointing(policy, config.activation_checkpoint, random=config.lora.dropout > 0)
    reduced = {training.mixed_precision_param, training.mixed_precision_reduce} != {training.dtype}
    # One rank needs FSDP2 only for its other effects.
    if dims.fsdp_enabled or reduced or training.enable_cpu_offload is True:
        apply_fsdp(policy, dims, config)


def _compiled(forward: Callable[..., torch.Tensor], backend: str, full_graph: bool) -> Callable[..., torch.Tensor]:
    """Compile a layer's forward as one graph (without graph breaks if `whole`), shared by all layers that are alike."""
    compiled = torch.compile(forward, backend=backend, fullgraph=full_graph)

    def run(
        x: torch.Tensor, rotary: RotaryTables | None, attend: PackedAttention, routing: Routing | None = None
    ) -> torch.Tensor:
        if type(x) is not torch.Tensor:
            # x may be a pending collective's result, and a graph that begins with one loses its gradient (torch 2.13).
            x = x.clone()
        # Packs differ in tokens and sequences, but DTensor does not support marking every size as dynamic.
        for tensor in (x, *(rotary or ()), attend.cumulative, attend.bounds):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(x, rotary, attend, routing)

    return run


def apply_tensor_parallelism(policy: Decoder, mesh: DeviceMesh) -> None:
    """Shard every layer over `mesh`; between layers the pack's tokens are sharded (sequence parallelism).
    preflight/model.py checks which models and degrees are supported."""
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "model.norm": SequenceParallel(sequence_dim=0, use_local_output=True),
        "lm_head": VocabularyParallel(),
    }
    whole_pack = PrepareModuleInput(
        input_layouts=(Shard(0), None, None), desired_input_layouts=(Replicate(), None, None)
    )
    attention: dict[str, ParallelStyle] = {
        "self_attn": whole_pack,
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(0)),
    }
    recurrence: dict[str, ParallelStyle] = {
        "linear_attn": whole_pack,
        "linear_attn.in_proj_*": ColwiseParallel(),
        "linear_attn.norm": SequenceParallel(sequence_dim=1, use_local_output=True),
        "linear_attn.out_proj": RowwiseParallel(output_layouts=Shard(0)),
    }
    layer_plan: dict[str, ParallelStyle] = {
        "mlp": PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(0)),
    }
    for place, name in enumerate(policy.args.kind.norms):
        if name:
            # The outputs of norms after attention and feed-forward are added to a plain tensor.
            layer_plan[name] = SequenceParallel(sequence_dim=0, use_local_output=place % 2 == 1)
    if policy.args.qk_norm:
        # All heads share one weight, and the sharded dimension is that of the heads: [T, heads, D].
        attention["self_attn.q_norm"] = SequenceParallel(sequence_dim=1, use_local_output=True)
        attention["self_attn.k_norm"] = SequenceParallel(sequence_dim=1, use_local_output=True)
    parallelize_module(policy, mesh, plan)
    for layer in policy.layers:
        own_plan = layer_plan if not isinstance(layer.mlp, MoE) else mixture_plan(layer_plan, layer.mlp)
        if layer.mixer == "linear_attn":
            parallelize_module(layer.get_submodule("linear_attn"), mesh, HeadParallel())
        parallelize_module(layer, mesh, own_plan | (recurrence if layer.mixer == "linear_attn" else attention))
    policy.sequence_parts = mesh.size()
    policy.tie_weights()


class VocabularyShard:
    """Converts between LogProbHead's sharded tensors and plain ones: its weight is sharded over `mesh` along the
    vocabulary, and all ranks get the same log-probs."""

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh

    def part(self, weight: torch.Tensor) -> VocabularyPart:
        """This rank's rows of weight [V, H]."""
        assert isinstance(weight, DTensor)
        ranks, total = self.mesh.size(), weight.shape[0]
        return VocabularyPart(local_region(weight)[0].start, total, -(-total // ranks), self.mesh.get_group())

    def local(self, hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's tokens [N / ranks, H] -> all of them [N, H], and this rank's rows of the weight."""
        assert isinstance(weight, DTensor)
        gathered = DTensor.from_local(hidden, self.mesh, [Shard(0)], run_check=False).redistribute(
            placements=[Replicate()]
        )
        # Each rank's gradient of the hidden states covers only its own vocabulary, so they add up.
        return gathered.to_local(grad_placements=[Partial()]), weight.to_local()

    def full_logits(self, logits: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """This rank's columns of the logits -> [N, V]."""
        shape = torch.Size((len(logits), weight.shape[0]))
        columns = DTensor.from_local(logits, self.mesh, [Shard(1)], run_check=False, shape=shape, stride=(shape[1], 1))
        return columns.full_tensor()


class VocabularyParallel(ParallelStyle):
    """Shards a LogProbHead's weight along the vocabulary, like the embedding's."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.shard = VocabularyShard(device_mesh)  # type: ignore[assignment]
        return distribute_module(module, device_mesh, self._partition)

    @staticmethod
    def _partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        weight = module.get_parameter("weight")
        module.register_parameter("weight", nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])))


def apply_activation_checkpointing(policy: Decoder, config: ActivationCheckpoint, random: bool = False) -> None:
    """Recompute the activations of all layers (full), of every second one (selective), or of all but for attention (op)
    in the backward.

    random: layers draw random numbers, and the recomputation must draw the same ones.
    """
    every = SELECTED if config.mode == "selective" else 1
    for layer in list(policy.layers)[::every]:
        # Replacing the forward instead of wrapping the module keeps checkpoint names, and FSDP's hooks on the outside.
        # A mixture is recomputed with the experts that it chose first. If rounding changed a choice, ranks would send
        # tokens that other ranks do not expect.
        ops = [torch.ops.aten.topk.default] if isinstance(getattr(layer, "mlp", None), MoE) else []
        ops += ATTENTION if config.mode == "op" else []
        selective: dict[str, Any] = (
            {"context_fn": functools.partial(create_selective_checkpoint_contexts, ops)} if ops else {}
        )
        _replace_forward(
            layer,
            functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=random, **selective),
        )


def apply_fsdp(policy: Decoder, dims: ParallelDims, config: JobConfig) -> None:
    """Shard parameters, gradients and optimizer state over the data-parallel ranks, layer by layer (FSDP2, HSDP)."""
    training = config.training
    on_host = training.enable_cpu_offload is True
    offload = CPUOffloadPolicy(pin_memory=device().type == "cuda") if on_host else OffloadPolicy()
    options: dict[str, Any] = {
        "mesh": dims.fsdp_mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=DTYPES[training.mixed_precision_param], reduce_dtype=DTYPES[training.mixed_precision_reduce]
        ),
        "offload_policy": offload,
    }
    reshard = config.parallelism.fsdp_reshard_after_forward
    experts: set[nn.Module] = set()
    if dims.ep > 1 or dims.tp > 1:
        experts = {mixture.experts for mixture in mixtures(policy)}
        shard_experts(policy, dims, reshard != "never", options)
    for layer in policy.layers:
        # The backward starts with the last layer, which would have to be gathered again at once.
        last = layer is policy.layers[-1]
        fully_shard(layer, reshard_after_forward=reshard == "always" or (reshard == "default" and not last), **options)
    # Embedding, final norm and head form one group, because tied weights must be in the same group.
    fully_shard(policy, reshard_after_forward=reshard == "always", **options)
    unshared: list[FSDPModule] = []
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the tokens of all ranks. Factor 1 alone selects a pre-multiplied sum,
            # which gloo lacks.
            if (_experts_mesh(dims) if module in experts else dims.fsdp_mesh).size() > 1:
                # With no other rank it would be a pass over all gradients.
                module.set_gradient_divide_factor(1.0)
            elif keeps_unsharded_params(config):
                unshared.append(module)
            module.set_force_sum_reduction_for_comms(True)
    policy.unshared = unshared


def before_micro_batch(policy: Decoder, last: bool) -> None:
    """Prepare for one more backward; last: of an optimizer step. FSDP2 reduces gradients over the ranks in each, but it
    casts and copies parameters that a rank holds alone as it does others, so these stay gathered until the last.
    """
    for module in policy.unshared:
        module.set_requires_gradient_sync(last, recurse=False)
        module.set_reshard_after_backward(last, recurse=False)
        if not isinstance(module, Decoder):
            # After the last, a forward without a backward must leave nothing gathered.
            module.set_reshard_after_forward(last, recurse=False)


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    # setattr, because mypy considers a method not assignable.
    setattr(module, "forward", forward)  # noqa: B010
