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

    fused = config.implementation == "fused" and _fused_kernel_works(parameters)
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=fused,
        foreach=not fused and config.implementation != "for-loop",
    )


def _fused_kernel_works(parameters: list[nn.Parameter]) -> bool:
    """Whether torch's fused AdamW takes these devices and types; torch itself only finds out in the first step."""
    for device, dtype in {(parameter.device, parameter.dtype) for parameter in parameters}:
        probe = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))
        probe.grad = torch.zeros_like(probe)
        try:
            torch.optim.AdamW([probe], fused=True).step()
        except (RuntimeError, NotImplementedError) as error:
            logger.warning("optimizer.implementation = fused does not work here (%s): using foreach", error)
            return False
    return True
