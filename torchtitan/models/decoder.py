"""One decoder for Llama 3, Qwen2/2.5 and Qwen3: a family is a row of switches in ModelArgs.

Parameter names are the Hugging Face checkpoint names, so loading, saving and syncing need no adapter. The trainer
and the embedded engine run the same modules and differ in one argument: the attention they pass in.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.config.job_config import Lora
from torchtitan.models.attention import AttentionLayer, PackedAttention, PackedLayout
from torchtitan.models.batch_invariance import InvariantSizes, invariant_sizes
from torchtitan.models.expert_args import MISSING
from torchtitan.models.fused_head import TokenObjective
from torchtitan.models.kept_tokens import KeptTokens
from torchtitan.models.logprob_head import LogProbHead
from torchtitan.models.model_args import ModelArgs
from torchtitan.models.moe import MoE, Routing, expert_rows
from torchtitan.models.rms_norm import RMSNorm
from torchtitan.models.rotary import rotary_tables, rotate
from torchtitan.models.swiglu import swiglu

# (layer, query [T, heads, D], key [T, key-value heads, D], value) -> [T, heads, D]
AttentionFunction = Callable[[AttentionLayer, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
RotaryTables = tuple[torch.Tensor, torch.Tensor]


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions; how keys are found is the caller's."""

    def __init__(self, args: ModelArgs, index: int):
        super().__init__()
        self.index = index
        self.window, self.softcap, self.scale = 0, 0.0, 1 / math.sqrt(args.head_dim)
        self.sinks: torch.Tensor | None = None
        self.head_dim = args.head_dim
        query, key_value = args.num_attention_heads * args.head_dim, args.num_key_value_heads * args.head_dim
        self.q_proj = nn.Linear(args.hidden_size, query, bias=args.qkv_bias)
        self.k_proj = nn.Linear(args.hidden_size, key_value, bias=args.qkv_bias)
        self.v_proj = nn.Linear(args.hidden_size, key_value, bias=args.qkv_bias)
        self.o_proj = nn.Linear(query, args.hidden_size, bias=False)
        self.q_norm = RMSNorm(args.head_dim, args.rms_norm_eps) if args.qk_norm else None
        self.k_norm = RMSNorm(args.head_dim, args.rms_norm_eps) if args.qk_norm else None
        # For generation, see fused_projections.py; never set where the policy is trained.
        self.fused: Callable[[torch.Tensor, RotaryTables], tuple[torch.Tensor, ...]] | None = None

    def forward(self, x: torch.Tensor, rotary: RotaryTables, attend: AttentionFunction) -> torch.Tensor:
        if self.fused is not None:
            return self.o_proj(attend(self, *self.fused(x, rotary)).flatten(-2))
        # -1 heads: under tensor parallelism a rank sees its share of them.
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        return self.o_proj(attend(self, q, k, v).flatten(-2))


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.fused: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused is not None:
            return self.down_proj(self.fused(x))
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


def feed_forward(args: ModelArgs, index: int) -> MLP | MoE:
    """What a layer has behind its attention."""
    if args.experts is None or index in args.dense_layers:
        return MLP(args.hidden_size, args.intermediate_size)
    wide = args.experts.shared_intermediate_size
    return MoE(args.experts, args.hidden_size, index, MLP(args.hidden_size, wide) if wide else None)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, args: ModelArgs, index: int):
        super().__init__()
        self.self_attn = Attention(args, index)
        self.mlp = feed_forward(args, index)
        self.input_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)

    def forward(
        self, x: torch.Tensor, rotary: RotaryTables, attend: AttentionFunction, routing: Routing | None = None
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, attend)
        normed = self.post_attention_layernorm(x)
        return x + (self.mlp(normed, routing) if isinstance(self.mlp, MoE) else self.mlp(normed))


class DecoderStack(nn.Module):
    """Embeddings, layers and the final norm: what Hugging Face checkpoints call `model`."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(args, index) for index in range(args.num_hidden_layers))
        self.norm = RMSNorm(args.hidden_size, args.rms_norm_eps)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: AttentionFunction,
        rotary: RotaryTables | None = None,
        routes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """token_ids [T] at positions [T] -> hidden states [T, H]; `rotary` where the caller has the tables already.

        routes [T, layers, k]: the experts of each token where an engine has chosen them, see moe.Routing.
        """
        x = self.embed_tokens(token_ids)
        if rotary is None:
            rotary = rotary_tables(self.args, positions, x.dtype)
        routing = None
        if self.args.experts is not None:
            sizes = invariant_sizes(self.args, x.dtype, x.device)
            routing = Routing(routes, expert_rows(sizes, x.device))
        for layer in self.layers:
            x = layer(x, rotary, attend, routing)
        return self.norm(x)


class Decoder(nn.Module):
    """A causal language model over packed tokens. Create it on the meta device and load weights afterwards."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        # Sequence parallelism cuts the pack into this many equal parts; `parallelize` sets it.
        self.sequence_parts = 1
        # Low-rank adapters, where there are; see lora.py.
        self.lora: Lora | None = None
        self.model = DecoderStack(args)
        self.lm_head = LogProbHead(args.hidden_size, args.vocab_size)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make the head's weight the embedding's, where the model ties them. Call again after replacing parameters."""
        if self.args.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.get_parameter("weight")

    def invariant_sizes(self) -> InvariantSizes:
        """At which sizes this model computes a token alike whatever else is in the batch: trainer and engine keep to
        them."""
        return invariant_sizes(self.args, self.lm_head.weight.dtype, self.lm_head.weight.device)

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
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """token_ids [T] packed as `layout` says -> logits [T, V]; with targets [T], (log-probs [T], entropy [T]).

        rows [n]: positions that the targets [n] (and `kept`) belong to, so that prompts cost the head nothing.
        objective: see LogProbHead; the result is then (loss [], log-probs [n], entropy [n]).
        routes [T, layers, k]: experts that an engine has chosen, see moe.Routing.
        """
        sizes = self.invariant_sizes()
        positions, padding = layout.positions, -len(token_ids) % math.lcm(self.sequence_parts, sizes.rows)
        if padding:
            # No real token sees these: attention leaves them out and the head cuts them off.
            token_ids, positions = F.pad(token_ids, (0, padding)), F.pad(positions, (0, padding))
            routes = None if routes is None else F.pad(routes, (0, 0, 0, 0, 0, padding), value=MISSING)
        hidden = self.model(token_ids, positions, PackedAttention(layout), routes=routes)
        output = self.lm_head(hidden, targets, temperature, kept, rows, objective, sizes.rows)
        return output[: layout.total] if isinstance(output, torch.Tensor) and padding else output

    def logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [B, T] -> logits [B, T, V]; every row is a sequence of its own, without padding."""
        batch, length = token_ids.shape
        layout = PackedLayout([length] * batch, token_ids.device)
        return self(token_ids.flatten(), layout).unflatten(0, (batch, length))

    @torch.no_grad()
    def initialize_weights(self, seed: int, std: float = 0.02) -> None:
        """Random weights as in GPT-2: normal for matrices, zero for biases, one for norms; alike on any layout."""
        from torchtitan.distributed.placement import copy_full_

        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                copy_full_(parameter, torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        for buffer in self.buffers():
            buffer.zero_()
