"""The optimizers of a policy: AdamW, Muon for matrices, or AdamW with its state in eight bits."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan.config.job_config import Optimizer as OptimizerConfig
from torchtitan.errors import UserError

logger = logging.getLogger(__name__)

# Momentum of Muon, as its author has it (Jordan et al. 2024).
MUON_MOMENTUM = 0.95
# Matrices that Muon is not for: what they multiply is a token, not an activation.
NOT_FOR_MUON = ("embed_tokens", "lm_head")


def build_optimizer(policy: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer that the configuration names, over the parameters that are trained.

    Weight decay is decoupled, and for matrices and embeddings; norms and biases (one dimension) go without. AdamW falls
    back from `fused` to `foreach` with a log line where torch has no fused kernel for the parameters.

    Raises:
        UserError: Muon or AdamW8bit for sharded parameters, or where torch or bitsandbytes does not have it.
    """
    trained = {name: one for name, one in policy.named_parameters() if one.requires_grad}
    if config.name != "AdamW" and any(isinstance(one, DTensor) for one in trained.values()):
        # torch's Muon computes wrong updates of a DTensor without a word, and bitsandbytes knows none.
        raise UserError(f"optimizer.name = {config.name} is for one trainer rank, which has the whole parameters")
    if config.name == "Muon":
        matrices = [one for name, one in trained.items() if one.dim() == 2 and not _is_for_tokens(name)]
        chosen = set(matrices)
        rest = [one for one in trained.values() if one not in chosen]
        return _Together([*([_muon(matrices, config)] if matrices else []), *([_adamw(rest, config)] if rest else [])])
    return _adamw(list(trained.values()), config)


def _is_for_tokens(name: str) -> bool:
    return any(part in name.split(".") for part in NOT_FOR_MUON)


def _muon(matrices: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Muon with updates of the size of AdamW's, so that one rate and one decay serve both (Liu et al. 2025, Moonlight,
    section 2.2)."""
    if not hasattr(torch.optim, "Muon"):
        raise UserError(f"optimizer.name = Muon needs torch 2.9 or newer, this is {torch.__version__}")
    return torch.optim.Muon(
        matrices, lr=config.lr, weight_decay=config.weight_decay, momentum=MUON_MOMENTUM, adjust_lr_fn="match_rms_adamw"
    )


def _adamw(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    # One kernel updates a group at a time, and takes no parameters of different meshes: experts have their own.
    groups: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((parameter.dim() > 1, mesh), []).append(parameter)
    chosen: list[dict[str, Any]] = [
        {"params": g, "weight_decay": config.weight_decay if decays else 0.0} for (decays, _), g in groups.items()
    ]
    if config.name == "AdamW8bit":
        try:
            eight_bit: Any = importlib.import_module("bitsandbytes.optim")
        except ImportError as error:
            raise UserError(f"optimizer.name = AdamW8bit needs the package bitsandbytes ({error})") from error
        return eight_bit.AdamW8bit(chosen, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)
    fused = config.implementation == "fused" and _fused_kernel_works(parameters)
    return torch.optim.AdamW(
        chosen,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=fused,
        foreach=not fused and config.implementation != "for-loop",
    )


class _Together(torch.optim.Optimizer):
    """Several optimizers as one: their groups and their state are its own."""

    def __init__(self, parts: list[torch.optim.Optimizer]):
        super().__init__([{"params": group["params"]} for part in parts for group in part.param_groups], {})
        self._parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]
        for part in parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for part in self._parts:
            part.step()


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
