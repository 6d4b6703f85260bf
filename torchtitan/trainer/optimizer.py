"""The parts that update weights after a backward: optimizers, learning rate, and the routers' biases."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan.config.job_config import LRScheduler as LRSchedulerConfig
from torchtitan.config.job_config import Optimizer as OptimizerConfig
from torchtitan.distributed.collectives import all_reduce_sum
from torchtitan.distributed.placement import local_tensor
from torchtitan.errors import UserError
from torchtitan.models.decoder import Decoder
from torchtitan.models.layers.mixture import MoE
from torchtitan.models.parallelize import mixtures
from torchtitan.models.roles import Role, matrices_of, role_of
from torchtitan.trainer.muon import Muon

logger = logging.getLogger(__name__)

# AdamW's term in the denominator.
EPS = 1e-8


def build_optimizer(policy: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build the optimizer that the configuration names, over the trained parameters.

    Weight decay is decoupled and applies to matrices and embeddings, not to norms and biases (models/roles.py). AdamW
    falls back from `fused` to `foreach`, with a log line, if torch has no fused kernel for the parameters.

    Raises:
        UserError: bitsandbytes is missing.
    """
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    roles = {p: role_of(policy, name) for name, p in trained.items()}
    if config.name == "Muon":
        matrices = {p: matrices_of(policy, name) for name, p in trained.items() if roles[p] is Role.MATRIX}
        rest = {p: role for p, role in roles.items() if role is not Role.MATRIX}
        muon = [Muon(matrices, config.lr, config.weight_decay)] if matrices else []
        return OptimizersContainer([*muon, *([_adamw(rest, config)] if rest else [])])
    return _adamw(roles, config)


def _adamw(roles: Mapping[nn.Parameter, Role], config: OptimizerConfig) -> torch.optim.Optimizer:
    # One kernel updates a group, whose parameters must have the same mesh; experts have their own.
    groups: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for parameter, role in roles.items():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((role is not Role.VECTOR, mesh), []).append(parameter)
    weight_decay = {True: config.weight_decay, False: 0.0}
    chosen: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": weight_decay[decays]} for (decays, _), parameters in groups.items()
    ]
    if config.name == "AdamW8bit":
        try:
            eight_bit: Any = importlib.import_module("bitsandbytes.optim")
        except ImportError as error:
            raise UserError(f"optimizer.name = AdamW8bit needs the package bitsandbytes ({error})") from error
        betas = config.beta1, config.beta2
        return _OnShards(chosen, config.lr, functools.partial(eight_bit.AdamW8bit, betas=betas, eps=EPS))
    fused = _fused_kernel_works(roles)
    return torch.optim.AdamW(
        chosen,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=EPS,
        fused=fused,
        foreach=not fused,
    )


class _OnShards(torch.optim.Optimizer):
    """An elementwise optimizer that knows no DTensor, applied to each rank's parts; so its state is of these parts.

    make: of the groups.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, make: Callable[..., torch.optim.Optimizer]):
        super().__init__(groups, {"lr": lr})
        self._parts = {p: nn.Parameter(local_tensor(p.detach())) for group in groups for p in group["params"]}
        self._optimizer = make([self._on_parts(group) for group in groups])

    def _on_parts(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**group, "params": [self._parts[parameter] for parameter in group["params"]]}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group, inner in zip(self.param_groups, self._optimizer.param_groups, strict=True):
            inner["lr"] = group["lr"]
        for parameter, part in self._parts.items():
            # FSDP2 may have moved it.
            part.data = local_tensor(parameter.detach())
            if parameter.grad is not None and part.numel():
                part.grad = local_tensor(parameter.grad)
                self._optimizer.state[part] = self.state[parameter]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


class OptimizersContainer(torch.optim.Optimizer):
    """Several optimizers as one, with all of their groups and state."""

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


def _fused_kernel_works(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether torch's fused AdamW supports these devices and types; torch itself only checks in the first step."""
    for device, dtype in {(parameter.device, parameter.dtype) for parameter in parameters}:
        probe = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))
        probe.grad = torch.zeros_like(probe)
        try:
            torch.optim.AdamW([probe], fused=True).step()
        except (RuntimeError, NotImplementedError) as error:
            logger.warning("the fused kernel of AdamW does not work here (%s): using foreach", error)
            return False
    return True


def lr_factor(batch: int, config: LRSchedulerConfig, total_batches: int) -> float:
    """Return the share of the peak rate for batch number `batch` (from 0).

    Warmup over w batches: (batch + 1) / (w + 1), so that no batch trains with rate 0. Then, with
    p = (batch − w) / (total_batches − w) and m = min_lr_factor: 1, or 1 − (1 − m)·p, or m + (1 − m)·(1 + cos πp) / 2.
    """
    if batch < config.warmup_steps:
        return (batch + 1) / (config.warmup_steps + 1)
    if config.decay_type == "constant":
        return 1.0
    progress = min(1.0, (batch - config.warmup_steps) / max(1, total_batches - config.warmup_steps))
    shape = 1 - progress if config.decay_type == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.min_lr_factor + (1 - config.min_lr_factor) * shape


class BatchLRScheduler:
    """Sets the rate of all parameter groups; step() once per trained batch, however many optimizer steps it took.

    The peak of each group is the optimizer's rate at creation; total_batches is training.steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: LRSchedulerConfig, total_batches: int):
        self._optimizer = optimizer
        self._config = config
        self._total_batches = total_batches
        self._peaks = [float(group["lr"]) for group in optimizer.param_groups]
        self._batch = 0
        self._apply()

    def step(self) -> None:
        """Advance to the next batch."""
        self._batch += 1
        self._apply()

    def get_last_lr(self) -> list[float]:
        """Return the rate of the current batch, per parameter group."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self._batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a batch; shape and peak come from the current configuration."""
        self._batch = int(state["batch"])
        self._apply()

    def _apply(self) -> None:
        factor = lr_factor(self._batch, self._config, self._total_batches)
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor


class ExpertLoad:
    """Balance without an auxiliary loss (Wang et al. 2024): the router's bias, which affects the choice of experts but
    not their weights, moves towards experts with less than their share of the tokens.

    It counts the experts of the forwards within `counting`: those of an optimizer step, and neither forwards that only
    score nor the recomputation of layers.

    rate: how far a bias moves in a step.
    """

    def __init__(self, policy: Decoder, rate: float):
        self._policy, self._rate = policy, rate
        self._mixtures = mixtures(policy)
        self._loads: dict[int, torch.Tensor] = {}
        """By layer [experts], float64: how often its experts were chosen since the last `zero`"""
        self._occurrences: torch.Tensor | None = None
        for mixture in self._mixtures:
            # Compiled, a recomputation that does not count would be another graph than its forward.
            mixture.record = torch.compiler.disable(functools.partial(self._count, mixture))

    @contextlib.contextmanager
    def counting(self, occurrences: torch.Tensor) -> Iterator[None]:
        """Count the experts of a forward of these tokens within the block, occurrences [T] times each: a token that
        sequences share is computed once. What a forward pads its tokens with counts 0 times."""
        padded = F.pad(occurrences, (0, self._policy.padded_length(len(occurrences)) - len(occurrences)))
        context = self._policy.context
        self._occurrences = padded if context is None else padded[context.part(len(padded))]
        try:
            yield
        finally:
            self._occurrences = None

    def _count(self, mixture: MoE, layer: int, chosen: torch.Tensor) -> None:
        if self._occurrences is None:
            return
        if layer not in self._loads:
            self._loads[layer] = torch.zeros(mixture.gate.args.count, dtype=torch.float64, device=chosen.device)
        occurrences = self._occurrences.chunk(mixture.parts)[mixture.part].double()
        self._loads[layer].scatter_add_(0, chosen.flatten(), occurrences[:, None].expand(chosen.shape).flatten())

    @torch.no_grad()
    def step(self) -> None:
        """Update b ← b + rate · sign(mean load - load) after an optimizer step. A collective."""
        loads = all_reduce_sum(torch.stack([self._loads[mixture.index] for mixture in self._mixtures]))
        for mixture, load in zip(self._mixtures, loads, strict=True):
            bias = mixture.gate.e_score_correction_bias
            assert bias is not None
            bias += self._rate * (load.mean() - load).sign()

    def zero(self) -> None:
        """Count anew."""
        self._loads.clear()
