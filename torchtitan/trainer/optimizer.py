"""AdamW over a policy's parameters, plain or DTensor."""

from __future__ import annotations

import logging

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan.config.job_config import Optimizer as OptimizerConfig

logger = logging.getLogger(__name__)


def build_optimizer(policy: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW with decoupled weight decay on matrices and embeddings; norms and biases (one dimension) go without.

    Falls back from `fused` to `foreach` with a log line where torch has no fused kernel for the parameters.
    """
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    # One kernel updates a group at a time, and takes no parameters of different meshes: experts have their own.
    groups: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((parameter.dim() > 1, mesh), []).append(parameter)

    fused = config.implementation == "fused" and _fused_kernel_works(parameters)
    return torch.optim.AdamW(
        [{"params": g, "weight_decay": config.weight_decay if decays else 0.0} for (decays, _), g in groups.items()],
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
