"""Multi-head latent attention (MLA; DeepSeek-AI 2024, DeepSeek-V2): one small vector of a token makes the keys and
values of all heads. They are computed before attention, so kernels and caches are those of every other family."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.models.attention import AttentionFunction
from torchtitan.models.model_args import ATTENTION_PROJECTIONS, ModelArgs
from torchtitan.models.rms_norm import RMSNorm
from torchtitan.models.rotary import RotaryTables, rotate

# DeepSeek's own code and transformers take this whatever config.json says of rms_norm_eps.
EPS = 1e-6


class LatentAttention(nn.Module):
    """Self-attention whose heads share one turned part of their keys."""

    # A model has either the first, or the two after it.
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
        for name, (rows, columns) in args.projection_shapes().items():
            if name in ATTENTION_PROJECTIONS:
                self.add_module(name, nn.Linear(columns, rows, bias=args.has_bias(name)))
        self.q_a_layernorm = RMSNorm(self.sizes.queries, EPS) if self.sizes.queries else None
        self.kv_a_layernorm = RMSNorm(self.sizes.keys, EPS)

    def forward(self, x: torch.Tensor, rotary: RotaryTables, attend: AttentionFunction) -> torch.Tensor:
        """x [T, H] -> [T, H]."""
        sizes = self.sizes
        q = self.q_proj(x) if self.q_a_layernorm is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q, q_turned = q.unflatten(-1, (-1, sizes.unturned + sizes.turned)).split((sizes.unturned, sizes.turned), -1)
        latent, k_turned = self.kv_a_proj_with_mqa(x).split((sizes.keys, sizes.turned), -1)
        heads = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (-1, sizes.unturned + sizes.values))
        k, v = heads.split((sizes.unturned, sizes.values), -1)
        q_turned, k_turned = (rotate(one, *rotary, pairs=self.pairs) for one in (q_turned, k_turned[:, None]))
        q, k = torch.cat((q, q_turned), -1), torch.cat((k, k_turned.expand(-1, k.shape[1], -1)), -1)
        # Kernels and cache take values as wide as keys.
        out = attend(self, q, k, F.pad(v, (0, k.shape[-1] - sizes.values)))
        return self.o_proj(out[..., : sizes.values].flatten(-2))
