"""The weights that an engine computes with: exchanged for a whole version or replaced by it, made base + adapters, or
dropped.

Adapters are merged in place, always from an untouched copy of the base. Afterwards it is measured what the weights have
become: an adapter that never arrives would otherwise look like a policy that is merely old.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Mapping

import torch

from torchtitan.distributed.device import finish_compute
from torchtitan.inference.engines.embedded.weight_sets import WeightSets
from torchtitan.inference.serving.weight_digest import differing_parameters
from torchtitan.inference.serving.weight_verification import (
    AdapterVersion,
    OnMismatch,
    Verification,
    is_adapter_version,
    outlines,
    read_adapters,
)
from torchtitan.models.adapter_math import low_rank_product, rounded
from torchtitan.models.decoder import Decoder
from torchtitan.weight_sync.memory.staging import StagedTensors, StagedVersion, WeightsRefused, to_copy

# Of the norm of what an adapter adds: what fp32 sums in another order may differ by.
SUM_TOLERANCE = 1e-3
# An update waits for so long. What is not looked at by then is not looked at: the next version will be.
FINISH_SECONDS = 4.0


class AdapterNotApplied(RuntimeError):
    """The weights in use are not base + adapter."""


class EngineWeights:
    """The parameters of `policy`, which stay the same objects whatever memory they have. `progress` is called now and
    then while they change. Takes memory for a copy of every parameter that adapters have touched, and for a second set
    if versions are received into one."""

    def __init__(self, policy: Decoder, progress: Callable[[], None]):
        self.sets = WeightSets(policy)
        self.figures: dict[str, float] = {}
        """Of the last version, if it was adapters: Frobenius norms of what they are, as sent (adapter_norm), and of
        what they changed in the weights (adapter_applied_norm)"""
        self._progress = progress
        self._base: dict[str, torch.Tensor] = {}
        self._base_known = True
        self._base_bits: int | None = None

    @property
    def live(self) -> Mapping[str, torch.Tensor]:
        """Name in checkpoint files -> the tensor that is computed with; tied weights under all of their names."""
        return self.sets.live

    def plan(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """What changes the weights into this version: whole tensors, or adapters (versions.py).

        Raises WeightsRefused where names or shapes are not the model's; nothing has changed then. What is returned
        raises AdapterNotApplied where the weights are something else afterwards than base + adapters.
        """
        if is_adapter_version(tensors):
            return functools.partial(self._copy, tensors, functools.partial(self._merge, self._check_adapters(tensors)))
        self._check_whole(tensors)
        if not isinstance(tensors, StagedTensors) or tensors.received_in is None:
            return functools.partial(self._copy, tensors, functools.partial(self._replace, tensors))
        if not self.sets.is_idle(tensors.received_in):
            raise WeightsRefused("it was received into memory that this engine has given up since")
        return functools.partial(self._exchange, tensors)

    def drop(self) -> None:
        """Free all of them. They must not be used before `take`, nor trusted before a whole version has come."""
        self._forget_base()
        self.sets.drop()

    def take(self) -> None:
        """Where they were dropped: memory as large as before, with anything in it."""
        self.sets.take()

    def _copy(self, tensors: Mapping[str, torch.Tensor], change: Callable[[], None]) -> None:
        change()
        if isinstance(tensors, StagedTensors):
            # Whoever brought them may have given up meanwhile, and then the next version comes into their memory.
            tensors.check_offered()

    # A whole version

    def _check_whole(self, tensors: Mapping[str, torch.Tensor]) -> None:
        given = {self.live[name].data_ptr() for name in tensors if name in self.live}
        missing = [name for name, weight in self.live.items() if weight.data_ptr() not in given]
        unknown = [name for name in tensors if name not in self.live]
        wrong = [
            f"{name} {tuple(tensor.shape)} instead of {tuple(self.live[name].shape)}"
            for name, tensor in outlines(tensors).items()
            if name in self.live and tensor.shape != self.live[name].shape
        ]
        problems = [("lacks", missing), ("has unknown", unknown), ("has shapes", wrong)]
        differences = [f"{what} {', '.join(names[:3])}{' …' * (len(names) > 3)}" for what, names in problems if names]
        if differences:
            raise WeightsRefused(f"this version does not fit the model: it {'; it '.join(differences)}")

    def _replace(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._forget_base()
        for name, tensor in to_copy(tensors):
            self._progress()
            self.live[name].copy_(tensor)

    def _exchange(self, tensors: StagedTensors) -> None:
        self._forget_base()
        self._progress()
        tensors.exchange(self.sets.exchange)

    def _forget_base(self) -> None:
        """What this engine was loaded with is no longer there."""
        self._base.clear()
        self._base_known = False
        self.figures = {}

    # Adapters

    def _check_adapters(self, tensors: Mapping[str, torch.Tensor]) -> AdapterVersion:
        if not self._base_known:
            raise WeightsRefused("a whole version has replaced the base weights of these adapters: restart this actor")
        shapes = {name: tuple(weight.shape) for name, weight in self.live.items()}
        version = read_adapters(tensors, shapes.get)
        if self._base_bits not in (None, version.base_bits):
            text = f"the adapters are for a base in {version.base_bits} bits, but this engine's is in {self._base_bits}"
            raise WeightsRefused(f"{text}: restart this actor")
        return version

    def _merge(self, version: AdapterVersion) -> None:
        self._base_bits = version.base_bits
        if not self._base:
            self._round(version)
        norm = applied = 0.0
        for name in [*version.factors, *version.full_values]:
            if name not in self._base:
                self._base[name] = self.live[name].detach().clone()
        for name, base in self._base.items():
            self._progress()
            weight = self.live[name]
            if name in version.factors:
                a, b = (factor.to(weight.device) for factor in version.factors[name])
                addition = low_rank_product(version.scale, a, b)
                weight.copy_(base + addition)
                norm += float(addition.square().sum())
                applied += self._measured(name, version.scale, a, b) ** 2
            else:
                # What an earlier version had adapted and this one does not is the base's again.
                weight.copy_(version.full_values.get(name, base))
        self.figures = {"adapter_norm": math.sqrt(norm), "adapter_applied_norm": math.sqrt(applied)}

    def _round(self, version: AdapterVersion) -> None:
        """Make all projections, adapted or not, what they are in the trainer."""
        for name, weight in self.live.items():
            if version.quantizes(name):
                self._progress()
                weight.copy_(rounded(weight))

    def _measured(self, name: str, scale: float, a: torch.Tensor, b: torch.Tensor) -> float:
        """Norm of what the weight in use differs by from the base, after a probe that it is the adapter's product."""
        weight, base = self.live[name], self._base[name]
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


class Verifier(Verification):
    """Computes the version's checksums from the tensors that the engine computes with.

    Runs on a thread of its own while the engine generates again, so a pause is as long as without it; the next update
    waits until it is done, so it never sees half of one.

    live(): name -> tensor in use; others: see Verification. `torn` is called on the verifier's thread. `applied` and
    `finish` are called by one thread at a time.
    """

    def __init__(self, every: int, live: Callable[[], Mapping[str, torch.Tensor]], on_mismatch: OnMismatch):
        super().__init__(every, on_mismatch)
        self._live = live
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def applied(self, staged: StagedVersion) -> None:
        """The engine has taken this version. Returns at once."""
        if self.due(staged):
            self._stop.clear()
            judge = functools.partial(self.judge, staged, functools.partial(self._compare, staged))
            self._thread = threading.Thread(target=judge, name="weight-verification", daemon=True)
            self._thread.start()

    def finish(self, seconds: float = FINISH_SECONDS) -> None:
        """Before weights change: wait for the look that is under way, then end it."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join(seconds)
        self._stop.set()
        # It looks for the sign between two buckets, and waits for nothing but the engine's next step.
        thread.join()

    def _compare(self, staged: StagedVersion) -> str:
        assert staged.proof is not None
        # They do not change before finish().
        live = self._live()
        finish_compute(next(iter(live.values())).device)
        return differing_parameters(staged.proof, live, staged.tensors, self._stop.is_set)
