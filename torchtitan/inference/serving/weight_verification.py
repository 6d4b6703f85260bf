"""What is done with a version that has come, whatever the engine: adapters are merged for engines that take whole
versions only, and after an update it is looked whether the engine computes with what the trainer sent.

A version that is adapters only has `<module>.lora_A.weight`, `<module>.lora_B.weight`, what else is trained,
`lora_alpha`, and `lora_base_bits` where the base is held in four bits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from torchtitan.errors import UserError
from torchtitan.inference.serving.weight_digest import CheckStopped, Unverifiable
from torchtitan.models.adapter_math import (
    ALPHA,
    BASE_BITS,
    FACTOR_A,
    FACTOR_B,
    dequantize,
    is_quantized,
    low_rank_product,
    quantize,
)
from torchtitan.models.shape.checkpoint_files import is_redundant, open_tensors, tensor_files
from torchtitan.models.shape.checkpoint_shape import read_args
from torchtitan.weight_sync.memory.staging import StagedTensors, StagedVersion, WeightsRefused

logger = logging.getLogger(__name__)

# So many torn versions in a row are the fault of this process, or of its memory.
MAX_MISMATCHED = 3


@dataclass
class AdapterVersion:
    """What a version asks for, checked. Names are the base model's."""

    scale: float = 0.0
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Parameter -> (A [rank, in], B [out, rank])"""
    full_values: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameter -> its new value"""
    base_bits: int = 16
    """Of the base's projections"""

    def quantizes(self, name: str) -> bool:
        """Whether the base of this parameter, where it is not trained whole, is what four bits make of the engine's."""
        return self.base_bits == 4 and is_quantized(name)


def is_adapter_version(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether an update holds adapters instead of all weights."""
    return ALPHA in tensors


def read_adapters(
    tensors: Mapping[str, torch.Tensor], shape_of: Callable[[str], tuple[int, ...] | None]
) -> AdapterVersion:
    """What an update means for a base model whose parameters have these shapes (None: there is no such parameter).

    Raises WeightsRefused where it does not fit.
    """
    version, problems = AdapterVersion(), []
    for name, tensor in tensors.items():
        module, is_a, _ = name.partition("." + FACTOR_A)
        if name in (ALPHA, BASE_BITS) or name.endswith(FACTOR_B):
            continue
        target = f"{module}.weight" if is_a else name
        shape = shape_of(target)
        if shape is None:
            problems.append(f"there is no {target}")
        elif not is_a:
            if tuple(tensor.shape) != shape:
                problems.append(f"{name} has shape {list(tensor.shape)} instead of {list(shape)}")
            version.full_values[name] = tensor
        else:
            b = tensors.get(f"{module}.{FACTOR_B}")
            if b is None or (b.shape[0], tensor.shape[1]) != shape or b.shape[1] != len(tensor):
                found = None if b is None else list(b.shape)
                problems.append(f"factors {list(tensor.shape)} and {found} do not make {target} {list(shape)}")
            else:
                version.scale = float(tensors[ALPHA].double().sum()) / len(tensor)
                version.factors[target] = (tensor, b)
    lonely = [n for n in tensors if n.endswith(FACTOR_B) and n.replace(FACTOR_B, FACTOR_A) not in tensors]
    problems += [f"{name} has no {FACTOR_A}" for name in lonely]
    if not version.factors:
        problems.append("it holds no adapter")
    if BASE_BITS in tensors:
        version.base_bits = int(tensors[BASE_BITS].sum())
        if version.base_bits not in (4, 16):
            problems.append(f"a base of {version.base_bits} bits is not supported here")
    if problems:
        raise WeightsRefused(f"this version does not fit the model: {'; '.join(problems[:3])}")
    return version


class BaseWeights:
    """The weights of a checkpoint directory; its files are opened for the first version that needs them, and then stay
    open, so that the base is the same for all. device: where adapters are multiplied."""

    def __init__(self, directory: str | Path, device: torch.device | str = "cpu"):
        self._directory, self._device = Path(directory), torch.device(device)
        self._places: dict[str, Any] | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._quantized: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def merged(self, staged: StagedVersion) -> StagedVersion:
        """The same version; where it holds adapters, with all tensors of base + adapters, in the type of the adapters.

        Raises WeightsRefused where they do not fit the base, or that cannot be read.
        """
        if not is_adapter_version(staged.tensors):
            return staged
        try:
            self._open()
        except UserError as error:
            raise WeightsRefused(f"the base weights of the adapters cannot be read: {error}") from error
        version = read_adapters(staged.tensors, self._shapes.get)
        dtype = next(iter(staged.tensors.values())).dtype
        return replace(staged, tensors=MergedTensors(self, version, dtype, self._device))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of all parameters of the text model, in the order of the files."""
        return self._shapes

    def read(self, name: str) -> torch.Tensor:
        """A parameter as it is stored, in host memory; not to be written to."""
        assert self._places is not None
        tensor: torch.Tensor = self._places[name].get_tensor(name)
        return tensor

    def read_rounded(self, name: str) -> torch.Tensor:
        """A projection as four bits leave it, in fp32 where adapters are multiplied."""
        if name not in self._quantized:
            # Kept in host memory: the device's is the engine's.
            packed, absmax = quantize(self.read(name).to(self._device))
            self._quantized[name] = packed.cpu(), absmax.cpu()
        packed, absmax = self._quantized[name]
        return dequantize(packed.to(self._device), absmax.to(self._device), torch.float32)

    def _open(self) -> None:
        if self._places is not None:
            return
        args = read_args(self._directory)
        files = {
            name: path
            for name, path in tensor_files(self._directory).items()
            if not is_redundant(name, args.tie_word_embeddings) and not args.is_untrained(name)
        }
        handles = {path: open_tensors(path) for path in set(files.values())}
        self._shapes = {name: tuple(handles[path].get_slice(name).get_shape()) for name, path in files.items()}
        self._places = {name: handles[path] for name, path in files.items()}


class MergedTensors(Mapping[str, torch.Tensor]):
    """All tensors of base + adapters, each computed when it is asked for: iterate over them once."""

    def __init__(self, base: BaseWeights, version: AdapterVersion, dtype: torch.dtype, device: torch.device):
        self._base, self._version, self._dtype, self._device = base, version, dtype, device

    def __len__(self) -> int:
        return len(self._base.shapes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._base.shapes)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._version.full_values:
            return self._version.full_values[name]
        if self._version.quantizes(name):
            base = self._base.read_rounded(name)
        else:
            base = self._base.read(name).to(self._device)
        if name in self._version.factors:
            a, b = (factor.to(self._device) for factor in self._version.factors[name])
            base = low_rank_product(self._version.scale, a, b).add_(base)
        return base.to(self._dtype)

    def outlines(self) -> dict[str, torch.Tensor]:
        """Their shapes and types, as tensors without memory."""
        return {name: torch.empty(shape, dtype=self._dtype, device="meta") for name, shape in self._base.shapes.items()}


def outlines(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Tensors of the same shapes and types, for who wants to know no more: nothing is merged for them."""
    return tensors.outlines() if isinstance(tensors, MergedTensors | StagedTensors) else tensors


OnMismatch = Callable[[str, int, str, int], None]
"""on_mismatch(epoch, version, reason, how often in a row)"""


@dataclass
class Verified:
    """What /health and /metrics show."""

    version: int | None = None
    """The last one that was found whole"""
    matched: int = 0
    mismatched: int = 0
    unfinished: int = 0
    """Given up because the next version was there"""
    seconds: float = 0.0
    unverifiable: str = ""
    """Why nothing can be told; empty where something can"""
    mismatched_in_a_row: int = field(default=0, repr=False)

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "mismatched_in_a_row"}


class Verification:
    """Does the engine compute with what was sent? What all ways to look at it have in common.

    every: versions from one look to the next, 0 for none.
    on_mismatch: called where a version is not what was sent, and where it could not be looked at, which is no proof of
    anything good.
    """

    def __init__(self, every: int, on_mismatch: OnMismatch):
        self.every, self.status = every, Verified()
        self._on_mismatch = on_mismatch
        self._applied = 0

    @property
    def verifies(self) -> bool:
        """Whether versions are looked at, as far as is known."""
        return self.every > 0 and not self.status.unverifiable

    def due(self, staged: StagedVersion) -> bool:
        """Whether to look at this version, which the engine has just taken."""
        due = self.every > 0 and (self._applied % self.every == 0 or self.status.mismatched_in_a_row > 0)
        self._applied += 1
        # Adapters are not what the weights are: applying them looks for itself.
        return due and staged.proof is not None and not is_adapter_version(staged.tensors)

    def judge(self, staged: StagedVersion, check: Callable[[], str | None]) -> bool:
        """Have check() do a piece of the work: it returns what is wrong with this version, nothing where all has been
        found as it was sent, and None where there is more to do. Returns whether it is over."""
        started, status = time.monotonic(), self.status
        try:
            wrong = check()
        except CheckStopped as stopped:
            status.unfinished += 1
            reason = str(stopped) or "it was replaced before it was"
            logger.warning("the weights of version %d were not verified: %s", staged.version, reason)
            return True
        except Unverifiable as error:
            status.unverifiable = str(error)
            logger.warning("weights cannot be verified here: %s", error)
            return True
        except Exception as error:
            logger.exception("verifying version %d failed", staged.version)
            wrong = f"its weights could not be looked at: {error!r}"
        finally:
            status.seconds += time.monotonic() - started
        if wrong is None:
            return False
        if wrong:
            status.mismatched += 1
            status.mismatched_in_a_row += 1
            text = f"the engine does not hold version {staged.version} as it was sent: {wrong}"
            logger.error("%s", text)
            self._on_mismatch(staged.epoch, staged.version, text, status.mismatched_in_a_row)
        else:
            status.version, status.mismatched_in_a_row = staged.version, 0
            status.matched += 1
        return True
