"""What all ranks do next is decided in one place, rank 0, and shared as one small broadcast.

Collectives never meet out of order because every rank acts on the same sequence of orders.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torchtitan.distributed import device
from torchtitan.distributed.collectives import broadcast_bytes
from torchtitan.rollout.batch_codec import decode_batch, encode_batch
from torchtitan.rollout.types import Batch


class Kind(enum.Enum):
    """One byte on the wire."""

    BATCH = b"B"
    """train on the batch that comes with the order"""
    SNAPSHOT = b"S"
    """snapshot the owed version while there is no data"""
    WAIT = b"W"
    """nothing yet; sent so that no collective outlives its deadline"""
    EXPORT = b"E"
    """export a Hugging Face checkpoint"""
    STOP = b"X"
    """leave the loop"""


@dataclass
class Order:
    kind: Kind
    batch: Batch | None = None


def share_order(order: Order | None) -> Order:
    """Collective: rank 0 passes its order, the others None; all get rank 0's. Without other ranks, a no-op."""
    if device.world_size() == 1 and order is not None:
        return order
    if order is None:
        payload = broadcast_bytes(None)
        kind = Kind(payload[:1])
        return Order(kind, decode_batch(payload[1:]) if kind is Kind.BATCH else None)
    broadcast_bytes(order.kind.value + (encode_batch(order.batch) if order.batch else b""))
    return order
