"""Versions that are adapters only, as they are sent: `<module>.lora_A.weight`, `<module>.lora_B.weight`, what else is
trained, `lora_alpha`, and `lora_base_bits` where the base is held in four bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from torchtitan.models.low_rank import ALPHA, BASE_BITS, FACTOR_A, FACTOR_B
from torchtitan.models.nf4 import is_quantized
from torchtitan.weight_sync.staging import WeightsRefused


@dataclass
class AdapterVersion:
    """What a version asks for, checked. Names are the base model's."""

    scale: float = 0.0
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Parameter -> (A [rank, in], B [out, rank])"""
    whole: dict[str, torch.Tensor] = field(default_factory=dict)
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
            version.whole[name] = tensor
        else:
            b = tensors.get(f"{module}.{FACTOR_B}")
            if b is None or (b.shape[0], tensor.shape[1]) != shape or b.shape[1] != len(tensor):
                found = None if b is None else list(b.shape)
                problems.append(f"factors {list(tensor.shape)} and {found} make no {target} {list(shape)}")
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
            problems.append(f"a base of {version.base_bits} bits is not known here")
    if problems:
        raise WeightsRefused(f"this version does not fit the model: {'; '.join(problems[:3])}")
    return version
