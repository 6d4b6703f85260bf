"""AdamW over a policy's parameters, plain or DTensor."""

from __future__ import annotations

import logging

import torch
from torch import nn

from torchtitan.config.job_config import Optimizer as OptimizerConfig

logger = logging.getLogger(__name__)


def build_optimizer(policy: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW with decoupled weight decay on matrices and embeddings; norms and biases (one dimension) go without.

    Falls back from `fused` to `foreach` with a log line where torch has no fused kernel for the parameters.
    """
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in parameters if parameter.dim() > 1]
    plain = [parameter for parameter in parameters if parameter.dim() <= 1]
    groups = [
        {"params": group, "weight_decay": weight_decay}
        for group, weight_decay in ((decayed, config.weight_decay), (plain, 0.0))
        if group
    ]

    def build(fused: bool, foreach: bool) -> torch.optim.AdamW:
        betas = (config.beta1, config.beta2)
        return torch.optim.AdamW(
            [dict(group) for group in groups], lr=config.lr, betas=betas, eps=config.eps, fused=fused, foreach=foreach
        )

    if config.implementation == "fused":
        try:
            return build(fused=True, foreach=False)
        except RuntimeError as error:
            logger.warning("optimizer.implementation = fused does not work here (%s): using foreach", error)
    return build(fused=False, foreach=config.implementation != "for-loop")
