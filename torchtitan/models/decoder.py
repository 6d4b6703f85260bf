"""One decoder for all families: a family is a row of switches (families.py).

Parameter names are the Hugging Face checkpoint names, so loading, saving and syncing need no adapter. The trainer
and the embedded engine run the same modules and differ in one argument: the attention they pass in.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.config.job_config import Lora
from torchtitan.distributed.collectives import ContextAttention, ContextParallel
from torchtitan.distributed.placement import Place
from torchtitan.models.head.fused_head import TokenObjective
from torchtitan.models.head.logit_tiles import KeptTokens
from torchtitan.models.head.logprob_head import HeadFunction, LogProbHead
from torchtitan.models.layers.attention import AttentionFunction, PackedAttention, PackedLayout
from torchtitan.models.layers.batch_invariance import InvariantSizes, invariant_sizes
from torchtitan.models.layers.delta_rule import places_of
from torchtitan.models.layers.elementwise import RMSNorm, RotaryTables, rotary_tables, rotate, sigmoid, swiglu
from torchtitan.models.layers.gated_delta import GatedDeltaNet
from torchtitan.models.layers.mixture import MoE, Routing, expert_rows
from torchtitan.models.shape.families import FAMILIES, Family
from torchtitan.models.shape.mixture_args import MISSING
from torchtitan.models.shape.model_args import ATTENTION_PROJECTIONS, ModelArgs

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

# DeepSeek's own code and transformers use this value and ignore rms_norm_eps in config.json.
LATENT_EPS = 1e-6


def _shifted(
    objective: TokenObjective, first: int, log_probs: torch.Tensor, entropy: torch.Tensor, rows: slice
) -> torch.Tensor:
    """Apply the objective to rows that are counted from `first` on."""
    return objective(log_probs, entropy, slice(first + rows.start, first + rows.stop))


def _add_projections(module: nn.Module, args: ModelArgs) -> None:
    for name, (rows, columns) in args.projection_shapes().items():
        if name in ATTENTION_PROJECTIONS:
            module.add_module(name, nn.Linear(columns, rows, bias=args.has_bias(name)))


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions; the caller decides how keys and values are looked up."""

    # Which of these exist depends on the family.
    qkv_proj: nn.Linear
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    sinks: torch.Tensor | None

    def __init__(self, args: ModelArgs, index: int):
        super().__init__()
        self.index, self.head_dim = index, args.head_dim
        self.window, self.softcap = args.window(index), args.attention_softcap
        self.scale = args.attention_scale or 1 / math.sqrt(args.head_dim)
        self.sinks = nn.Parameter(torch.empty(args.num_attention_heads)) if args.kind.sinks else None
        self.rotary_pairs = args.kind.rotary_pairs
        self.gated = args.delta is not None
        query, key_value = args.num_attention_heads * args.head_dim, args.num_key_value_heads * args.head_dim
        self.joint_sizes = (query, key_value, key_value) if args.kind.joint_qkv else None
        _add_projections(self, args)
        self.whole_norm = args.qk_norm == "whole"
        sizes = (query, key_value) if self.whole_norm else (args.head_dim, args.head_dim)
        norms: list[RMSNorm | None] = [None for _ in sizes]
        if args.qk_norm:
            norms = [RMSNorm(size, args.rms_norm_eps, args.kind.zero_norms) for size in sizes]
        self.q_norm, self.k_norm = norms
        # Set for generation (fused_projections.py), never on a policy that is trained.
        self.fused: Callable[[torch.Tensor, RotaryTables | None], tuple[torch.Tensor, ...]] | None = None

    def forward(self, x: torch.Tensor, rotary: RotaryTables | None, attend: AttentionFunction) -> torch.Tensor:
        if self.fused is not None:
            return self.o_proj(attend(self, *self.fused(x, rotary)).flatten(-2))
        if self.joint_sizes is not None:
            q, k, v = self.qkv_proj(x).split(self.joint_sizes, -1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.q_norm is not None and self.k_norm is not None and self.whole_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        gate = None
        if self.gated:
            # Half of each head's outputs.
            q, gate = (half.flatten(-2) for half in q.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1))
        # The number of heads is inferred, because a tensor-parallel rank holds only its share of them.
        q, k, v = (projected.unflatten(-1, (-1, self.head_dim)) for projected in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None and not self.whole_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(self, self.apply_rotary(q, rotary), self.apply_rotary(k, rotary), v).flatten(-2)
        return self.o_proj(out if gate is None else out * sigmoid(gate))

    def apply_rotary(self, x: torch.Tensor, rotary: RotaryTables | None) -> torch.Tensor:
        """Rotate x [T, heads, D] by its positions; in a layer without rotary positions x is unchanged."""
        return x if rotary is None else rotate(x, *rotary, pairs=self.rotary_pairs)


class LatentAttention(nn.Module):
    """Multi-head latent attention (MLA; DeepSeek-AI 2024, DeepSeek-V2): the keys and values of all heads are computed
    from one small vector per token, and the heads share the rotated part of their keys. Keys and values are computed
    before attention, so kernels and caches are the same as for every other family."""

    # A model has either q_proj, or q_a_proj and q_b_proj.
    q_proj: nn.Linear
    q_a_proj: nn.Linear
    q_b_proj: nn.Linear
    kv_a_proj_with_mqa: nn.Linear
    kv_b_proj: nn.Linear
    o_proj: nn.Linear

    def __init__(self, args: ModelArgs, index: int):
        super().__init__()
        assert args.latent is not None
        self.index, self.window, self.scale, self.softcap = index, 0, args.attention_scale, 0.0
        self.sinks: torch.Tensor | None = None
        self.sizes, self.pairs = args.latent, args.kind.rotary_pairs
        _add_projections(self, args)
        self.q_a_layernorm = RMSNorm(self.sizes.queries, LATENT_EPS) if self.sizes.queries else None
        self.kv_a_layernorm = RMSNorm(self.sizes.keys, LATENT_EPS)

    def forward(self, x: torch.Tensor, rotary: RotaryTables, attend: AttentionFunction) -> torch.Tensor:
        """x [T, H] -> [T, H]."""
        sizes = self.sizes
        q = self.q_proj(x) if self.q_a_layernorm is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q, q_rope = q.unflatten(-1, (-1, sizes.nope_dim + sizes.rope_dim)).split((sizes.nope_dim, sizes.rope_dim), -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((sizes.keys, sizes.rope_dim), -1)
        heads = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (-1, sizes.nope_dim + sizes.values))
        k, v = heads.split((sizes.nope_dim, sizes.values), -1)
        q_rope, k_rope = (rotate(part, *rotary, pairs=self.pairs) for part in (q_rope, k_rope[:, None]))
        q, k = torch.cat((q, q_rope), -1), torch.cat((k, k_rope.expand(-1, k.shape[1], -1)), -1)
        # Kernels and cache expect values as wide as keys.
        out = attend(self, q, k, F.pad(v, (0, k.shape[-1] - sizes.values)))
        return self.o_proj(out[..., : sizes.values].flatten(-2))


class MLP(nn.Module):
    """Gated feed-forward."""

    # Which of these exist depends on the family.
    gate_up_proj: nn.Linear
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def __init__(self, hidden_size: int, intermediate_size: int, kind: Family = FAMILIES["llama"], bias: bool = False):
        super().__init__()
        self.silu, self.joint = kind.activation == "silu", kind.joint_gate_up
        if self.joint:
            self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=bias)
        else:
            self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
            self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.fused: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused is not None:
            return self.down_proj(self.fused(x))
        gate, up = self.gate_up_proj(x).chunk(2, -1) if self.joint else (self.gate_proj(x), self.up_proj(x))
        return self.down_proj(self.activate(gate, up))

    def activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Combine gate and up [T, I] into the input of the last projection."""
        return swiglu(gate, up) if self.silu else F.gelu(gate, approximate="tanh") * up


def feed_forward(args: ModelArgs, index: int) -> MLP | MoE:
    """Return the feed-forward of a layer: dense, or a mixture of experts."""
    if args.experts is None or index in args.dense_layers:
        return MLP(args.hidden_size, args.intermediate_size, args.kind, args.mlp_bias)
    wide = args.experts.shared_intermediate_size
    return MoE(args.experts, args.hidden_size, index, MLP(args.hidden_size, wide) if wide else None)


class DecoderLayer(nn.Module):
    """Attention (or a recurrence in its place) and feed-forward, each with norms before or after it, and each added to
    the residual stream."""

    def __init__(self, args: ModelArgs, index: int):
        super().__init__()
        # The names of files.
        self.mixer = "linear_attn" if index in args.delta_layers else "self_attn"
        kind: type[nn.Module] = Attention
        if index in args.delta_layers:
            kind = GatedDeltaNet
        elif args.latent is not None:
            kind = LatentAttention
        self.add_module(self.mixer, kind(args, index))
        self.mlp = feed_forward(args, index)
        self.norms, self.residual_scale = args.kind.norms, args.residual_scale
        for name in filter(None, self.norms):
            self.add_module(name, RMSNorm(args.hidden_size, args.rms_norm_eps, args.kind.zero_norms))

    def forward(
        self, x: torch.Tensor, rotary: RotaryTables | None, attend: AttentionFunction, routing: Routing | None = None
    ) -> torch.Tensor:
        x = x + self._scaled(self._normed(1, getattr(self, self.mixer)(self._normed(0, x), rotary, attend)))
        normed = self._normed(2, x)
        added = self.mlp(normed, routing) if isinstance(self.mlp, MoE) else self.mlp(normed)
        return x + self._scaled(self._normed(3, added))

    def _normed(self, place: int, x: torch.Tensor) -> torch.Tensor:
        name = self.norms[place]
        return getattr(self, name)(x) if name else x

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.residual_scale == 1.0 else x * self.residual_scale


class DecoderStack(nn.Module):
    """Embeddings, layers and the final norm: the module that Hugging Face checkpoints call `model`."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        weight = torch.empty(args.vocab_size, args.hidden_size)
        # Normal numbers on the meta device, which nobody sees, would import all of torch.compile.
        placeholder = weight if weight.is_meta else None
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size, _weight=placeholder)
        self.layers = nn.ModuleList(DecoderLayer(args, index) for index in range(args.num_hidden_layers))
        self.norm = RMSNorm(args.hidden_size, args.rms_norm_eps, args.kind.zero_norms)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: AttentionFunction,
        rotary: list[RotaryTables] | None = None,
        routes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """token_ids [T] at positions [T] -> hidden states [T, H]; `rotary`: the tables, if the caller already has them.

        routes [T, layers, k]: each token's experts if an engine has chosen them, see moe.Routing.
        """
        x = self.embed_tokens(token_ids)
        if self.args.embedding_scale != 1.0:
            # In the weights' type, as in transformers.
            x = x * torch.tensor(self.args.embedding_scale, dtype=x.dtype, device=x.device)
        if rotary is None:
            rotary = rotary_tables(self.args, positions, x.dtype)
        routing = None
        if self.args.experts is not None:
            sizes = invariant_sizes(self.args, x.dtype, x.device)
            routing = Routing(routes, expert_rows(sizes, x.device))
        for index, layer in enumerate(self.layers):
            rope = self.args.rope_of(index)
            x = layer(x, None if rope is None else rotary[rope], attend, routing)
        return self.norm(x)


class Decoder(nn.Module):
    """A causal language model over packed tokens. Create it on the meta device and load weights afterwards."""

    unshared: Sequence[FSDPModule] = ()
    """Modules that this rank holds alone, which stay gathered through a step's micro-batches; `parallelize` sets it"""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        # The number of equal parts into which sequence parallelism cuts the pack; `parallelize` sets it.
        self.sequence_parts = 1
        # The ranks that share a pack's tokens, if there are several; `parallelize` sets it.
        self.context: ContextParallel | None = None
        # The settings of low-rank adapters, if the policy has any; see lora.py.
        self.lora: Lora | None = None
        self.model = DecoderStack(args)
        self.lm_head = LogProbHead(args.hidden_size, args.vocab_size)
        self.lm_head.softcap, self.lm_head.divisor = args.logit_softcap, args.logit_divisor
        self.tie_weights()

    def _apply(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        super()._apply(function, recurse)
        for module in self.modules():
            for name, buffer in module.named_buffers(recurse=False):
                # Steps of a router's bias are too small for half precision.
                module._buffers[name] = buffer.float() if buffer.is_floating_point() else buffer
        return self

    @property
    def layers(self) -> nn.ModuleList:
        """The layers in order, starting behind the embedding."""
        return self.model.layers

    def names_in_files(self, name: str) -> list[tuple[str, Place]]:
        """Return a parameter's names in files, engines and weight synchronisation, with the part each denotes."""
        return [*self.args.names_in_files(name)]

    def tie_weights(self) -> None:
        """Share the embedding's weight with the head if the model ties them. Repeat after replacing parameters."""
        if self.args.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.get_parameter("weight")

    def invariant_sizes(self) -> InvariantSizes:
        """Return the sizes at which the model computes a token alike whatever else is in the batch; trainer and engine
        use them."""
        return invariant_sizes(self.args, self.lm_head.weight.dtype, self.lm_head.weight.device)

    def padded_length(self, tokens: int) -> int:
        """Return the padded length of a pack of this many tokens: a multiple of its parts and of the kernels' sizes."""
        parts = math.lcm(self.sequence_parts, self.invariant_sizes().rows)
        parts *= 1 if self.context is None else self.context.ranks
        return -(-tokens // parts) * parts

    def computes_apart(self) -> str | None:
        """Why every run of a pack has to be a whole sequence; None if a run may continue another one."""
        if self.args.delta_layers:
            return "layers of Gated DeltaNet carry a state from the first token of a sequence to its last"
        return None if self.context is None else "context parallelism divides packs of whole sequences"

    def forward(
        self,
        token_ids: torch.Tensor,
        layout: PackedLayout,
        targets: torch.Tensor | None = None,
        temperature: float = 1.0,
        kept: KeptTokens | None = None,
        rows: torch.Tensor | None = None,
        objective: TokenObjective | None = None,
        routes: torch.Tensor | None = None,
        function: HeadFunction | None = None,
        entropy: bool = True,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """token_ids [T] packed as `layout` says -> logits [T, V]; with targets [T], (log-probs [T], entropy [T]).

        rows [n]: the positions that the targets [n] (and `kept`) belong to, so that the head skips prompts.
        objective: see LogProbHead; the result is then (loss [], log-probs [n], entropy [n]).
        routes [T, layers, k]: experts that an engine has chosen, see moe.Routing.
        function: see LogProbHead; not with context parallelism.
        entropy: False spares its computation, and gives zeros.

        With context parallelism, all ranks of the group are given the same arguments, and `rows` must ascend. Each rank
        gets all log-probs, and the loss of its own rows.
        """
        sizes = self.invariant_sizes()
        positions, padding = layout.positions, self.padded_length(layout.total) - layout.total
        if padding:
            # Padding is invisible to real tokens: attention leaves it out and the head drops it.
            token_ids, positions = F.pad(token_ids, (0, padding)), F.pad(positions, (0, padding))
            routes = None if routes is None else F.pad(routes, (0, 0, 0, 0, 0, padding), value=MISSING)
        context = self.context
        if context is None:
            hidden = self.hidden_states(token_ids, positions, layout, routes)
            output = self.lm_head(hidden, targets, temperature, kept, rows, objective, sizes.rows, function, entropy)
            return output[: layout.total] if isinstance(output, torch.Tensor) and padding else output
        rank_tokens = context.part(len(token_ids))
        rows = torch.arange(layout.total, device=token_ids.device) if rows is None else rows
        bounds = context.bounds(rows, len(token_ids))
        first, end = bounds[context.rank : context.rank + 2]
        attend = ContextAttention(PackedAttention(layout), context)
        routes = None if routes is None else routes[rank_tokens]
        hidden = self.model(token_ids[rank_tokens], positions[rank_tokens], attend, routes=routes)
        places = rows[first:end] - rank_tokens.start
        if targets is None:
            return context.gather(self.lm_head(hidden, row_step=sizes.rows)[places], bounds)
        asked = None if objective is None else functools.partial(_shifted, objective, first)
        kept = None if kept is None else kept.part(slice(first, end))
        output = self.lm_head(hidden, targets[first:end], temperature, kept, places, asked, sizes.rows, None, entropy)
        return (*output[:-2], *(context.gather(x, bounds) for x in output[-2:]))

    def hidden_states(
        self, token_ids: torch.Tensor, positions: torch.Tensor, layout: PackedLayout, routes: torch.Tensor | None
    ) -> torch.Tensor:
        """Hidden states [T, H] after the final norm."""
        attend = PackedAttention(layout)
        if self.args.delta_layers:
            # Once for all layers.
            attend.places = places_of(layout.cumulative, len(token_ids))
        hidden: torch.Tensor = self.model(token_ids, positions, attend, routes=routes)
        return hidden

    def logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [B, T] -> logits [B, T, V]; every row is a separate sequence, without padding."""
        batch, length = token_ids.shape
        layout = PackedLayout([length] * batch, token_ids.device)
        return self(token_ids.flatten(), layout).unflatten(0, (batch, length))

    @torch.no_grad()
    def initialize_weights(self, seed: int, std: float = 0.02) -> None:
        """Random weights as in GPT-2: normal for matrices, zero for biases, one for norms; the same on any layout."""
        from torchtitan.distributed.placement import copy_full_

        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                copy_full_(parameter, torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
            else:
                # A decay of e^-1 at a step of softplus(1), as in transformers on average.
                starts_at_one = name.endswith(("linear_attn.norm.weight", "linear_attn.dt_bias", "linear_attn.A_log"))
                starts_at_zero = self.args.kind.zero_norms or name.endswith("bias")
                parameter.fill_(1.0 if starts_at_one or not starts_at_zero else 0.0)
        for buffer in self.buffers():
            buffer.zero_()
