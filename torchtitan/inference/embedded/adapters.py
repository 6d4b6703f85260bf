"""Weight updates that are adapters only: merged into the engine's weights, always from an untouched copy of the base.

Afterwards it is measured what the engine's weights have become: an adapter that never arrives would otherwise look like
a policy that is merely old.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from torchtitan.inference.adapter_version import AdapterVersion, read_adapters
from torchtitan.models.low_rank import low_rank_product
from torchtitan.models.nf4 import rounded
from torchtitan.weight_sync.staging import WeightsRefused

# Of the norm of what an adapter adds: what fp32 sums in another order may differ by.
SUM_TOLERANCE = 1e-3


class AdapterNotApplied(RuntimeError):
    """The weights in use are not base + adapter."""


class AdapterMerger:
    """Merges adapters into `parameters` (name -> tensor in use), and knows what those were before.

    Takes memory for a copy of every parameter that adapters have touched.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]):
        self.figures: dict[str, float] = {}
        """Of the last version: Frobenius norms of what its adapters are, and of what they changed in the weights"""
        self._parameters = parameters
        self._base: dict[str, torch.Tensor] = {}
        self._base_known = True
        self._base_bits: int | None = None

    def forget_base(self) -> None:
        """All weights are being replaced: what this engine was loaded with is no longer there."""
        self._base.clear()
        self._base_known = False
        self.figures = {}

    def check(self, tensors: Mapping[str, torch.Tensor]) -> AdapterVersion:
        """What the update means. Raises WeightsRefused where it does not fit this engine; nothing has changed then."""
        if not self._base_known:
            raise WeightsRefused("adapters came, but a whole version has replaced the base weights: restart this actor")
        version = read_adapters(tensors, self._shape)
        if self._base_bits not in (None, version.base_bits):
            text = f"adapters of a base in {version.base_bits} bits came, but this engine's is in {self._base_bits}"
            raise WeightsRefused(f"{text}: restart this actor")
        return version

    def apply(self, version: AdapterVersion, progress: Callable[[], None]) -> None:
        """Make the weights base + adapters, in place; `progress` is called now and then.

        Raises AdapterNotApplied where they are something else afterwards.
        """
        self._base_bits = version.base_bits
        if not self._base:
            self._round(version, progress)
        norm = applied = 0.0
        for name in [*version.factors, *version.whole]:
            if name not in self._base:
                self._base[name] = self._parameters[name].detach().clone()
        for name, base in self._base.items():
            progress()
            weight = self._parameters[name]
            if name in version.factors:
                a, b = (factor.to(weight.device) for factor in version.factors[name])
                addition = low_rank_product(version.scale, a, b)
                weight.copy_(base + addition)
                norm += float(addition.square().sum())
                applied += self._measured(name, version.scale, a, b) ** 2
            else:
                # What an earlier version had adapted and this one does not is the base's again.
                weight.copy_(version.whole.get(name, base))
        self.figures = {"adapter_norm": math.sqrt(norm), "adapter_applied_norm": math.sqrt(applied)}

    def _round(self, version: AdapterVersion, progress: Callable[[], None]) -> None:
        """Make all projections, adapted or not, what they are in the trainer."""
        for name, weight in self._parameters.items():
            if version.quantizes(name):
                progress()
                weight.copy_(rounded(weight))

    def _shape(self, name: str) -> tuple[int, ...] | None:
        weight = self._parameters.get(name)
        return None if weight is None else tuple(weight.shape)

    def _measured(self, name: str, scale: float, a: torch.Tensor, b: torch.Tensor) -> float:
        """Norm of what the weight in use differs by from the base, after a probe that it is the adapter's product."""
        weight, base = self._parameters[name], self._base[name]
        change = weight.float() - base.float()
        generator = torch.Generator().manual_seed(0)
        probe = torch.randn(weight.shape[1], generator=generator).to(weight.device)
        expected = scale * (b.float() @ (a.float() @ probe))
        # Each element is rounded to the engine's type once, by half a unit in the last place at most.
        allowed = torch.finfo(weight.dtype).eps / 2 * weight.float().norm() + SUM_TOLERANCE * expected.norm()
        difference = float((change @ probe - expected).norm())
        if not difference <= allowed:
            text = f"{name}: the weight in use differs from base + adapter by {difference:.3g} on a probe"
            raise AdapterNotApplied(f"{text}, at most {float(allowed):.3g} is rounding")
        return float(change.norm())
