"""Routing replay: a micro-batch's tokens get the experts that the engine has computed them with.

A mixture's router may choose otherwise for the smallest difference in what it sees, and then the trainer differentiates
another policy than the one that was sampled from. With the engine's choice the two agree; the weights of the chosen
experts are always the trainer's own, so the router learns (Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by
Aligning Training and Inference Routers").
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from torchtitan.errors import UserError
from torchtitan.inference.trajectory import Branch, branch_routes
from torchtitan.models.expert_args import MISSING
from torchtitan.models.model_args import ModelArgs


def packed_routes(branches: Sequence[Branch], args: ModelArgs) -> torch.Tensor:
    """int16 [T, layers, k] for sequences behind each other, each without its last token; MISSING where no engine has
    said which ones.

    Raises UserError where these are no experts of the model.
    """
    assert args.experts is not None
    layers, per_token = args.num_hidden_layers, args.experts.per_token
    rows = []
    for branch in branches:
        known, tokens = branch_routes(branch), len(branch) - 1
        if known is None:
            known = np.full((tokens, layers, per_token), MISSING, np.int16)
        if known.size != tokens * layers * per_token or int(known.max(initial=0)) >= args.experts.count:
            raise UserError(
                f"grpo.routing_replay: an engine names experts up to {int(known.max(initial=0))}, "
                f"{known.size // max(tokens, 1)} for each token; this model has {args.experts.count} experts, "
                f"{layers} layers × {per_token} for each token: does the engine serve another model?"
            )
        # SGLang leaves it to the reader how its numbers divide into layers.
        rows.append(known.reshape(tokens, layers, per_token))
    return torch.from_numpy(np.concatenate(rows) if rows else np.full((1, layers, per_token), MISSING, np.int16))
