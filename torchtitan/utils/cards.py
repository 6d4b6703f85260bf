"""What GPUs can do, from their makers' data sheets. No torch here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torchtitan.utils.machine import ask_driver

# Bytes per second in one direction: over PCIe 4 and 5 with 16 lanes, and over NVLink of three generations.
PCIE_4, PCIE_5, NVLINK_3, NVLINK_4, NVLINK_5 = 32e9, 64e9, 300e9, 450e9, 900e9


@dataclass(frozen=True)
class Card:
    """A kind of GPU."""

    name: str
    """Words of the name that its driver gives it"""
    operations: float
    """Dense bf16 operations per second, summed in fp32"""
    bandwidth: float
    """Bytes of its memory per second"""
    link: float = PCIE_4
    """Bytes per second in one direction to the other GPUs of a machine"""
    host: float = PCIE_4
    """The same to host memory"""


# The first match counts: longer names come first. Sources: NVIDIA's and AMD's data sheets, which also list operations
# "with sparsity" that are twice as many; for GeForce NVIDIA's white papers on GA102, AD102 and GB202, "peak BF16 tensor
# TFLOPS with FP32 accumulate".
CARDS = (
    Card("H100 NVL", 835e12, 3.9e12, NVLINK_3, PCIE_5),
    Card("H100 PCIe", 756e12, 2.0e12, PCIE_5, PCIE_5),
    Card("H100", 989e12, 3.35e12, NVLINK_4, PCIE_5),
    Card("H200 NVL", 835e12, 4.8e12, NVLINK_4, PCIE_5),
    Card("H200", 989e12, 4.8e12, NVLINK_4, PCIE_5),
    Card("GH200", 989e12, 4.0e12, NVLINK_4, NVLINK_4),
    Card("H20", 148e12, 4.0e12, NVLINK_4, PCIE_5),
    Card("B200", 2250e12, 8.0e12, NVLINK_5, PCIE_5),
    Card("GB200", 2500e12, 8.0e12, NVLINK_5, NVLINK_4),
    Card("A100-SXM4-40GB", 312e12, 1.555e12, NVLINK_3),
    Card("A100-SXM4-80GB", 312e12, 2.039e12, NVLINK_3),
    Card("A100", 312e12, 1.935e12, NVLINK_3),
    Card("A800", 312e12, 1.935e12, 200e9),
    Card("A40", 149.7e12, 0.696e12),
    Card("A30", 165e12, 0.933e12),
    Card("A10G", 70e12, 0.6e12),
    Card("A10", 125e12, 0.6e12),
    Card("RTX A6000", 154.8e12, 0.768e12),
    Card("RTX 6000 Ada", 364e12, 0.96e12),
    Card("L40S", 362e12, 0.864e12),
    Card("L40", 181e12, 0.864e12),
    Card("L4", 121e12, 0.3e12),
    Card("RTX 3090", 71e12, 0.936e12),
    Card("RTX 4090", 165.2e12, 1.008e12),
    Card("RTX 5090", 209.5e12, 1.792e12, PCIE_5, PCIE_5),
    Card("MI300X", 1307e12, 5.3e12, NVLINK_4, PCIE_5),
)
H100 = next(card for card in CARDS if card.name == "H100")


def find_card(name: str) -> Card | None:
    """The card with this name; None for one that is not known, or for a part of one (MIG)."""
    if "MIG" in name:
        return None
    return next((card for card in CARDS if re.search(rf"\b{card.name}\b", name)), None)


def driver_card() -> tuple[str, Card | None]:
    """The name of this machine's first GPU, as its driver says it, and its card; an empty name without one."""
    name = next(iter(ask_driver("--query-gpu=name", "--format=csv,noheader")), "").strip()
    return name, find_card(name)
