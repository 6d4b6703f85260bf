"""How far apart rounding alone may bring two programs that compute the same: derived, not measured."""

from __future__ import annotations

import math

import torch

from torchtitan.models.shape.model_args import ModelArgs


def forward_rounding(args: ModelArgs, largest: float, eps: float = torch.finfo(torch.float32).eps) -> float:
    """How far two fp32 forwards of the same weights and tokens may be apart in a logit or log-prob.

    A sum of n terms in another order is off by about u · sqrt(n) of its terms' size (Higham and Mary 2019, for rounding
    errors that are independent of each other), where the unit roundoff u is half of `eps`, and that holds for either of
    the two forwards: together they are eps · sqrt(n) apart. n counts the terms along one path through the model: of q,
    k, v and o (or as many), of the down projection, and of the head.

    Args:
        args: The model's shape.
        largest: Largest |logit| or |log-prob|; one more covers terms that cancel where that is small.
        eps: Distance from 1 to the next number of the type in which is summed.
    """
    inner = args.num_hidden_layers * (4 * args.hidden_size + args.intermediate_size) + args.hidden_size
    return eps * math.sqrt(inner) * (1 + largest)
