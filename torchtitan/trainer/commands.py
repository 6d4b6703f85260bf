"""What rank 0 tells all ranks to do next, and how it travels to them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torchtitan.distributed import device
from torchtitan.distributed.collectives import broadcast_bytes
from torchtitan.inference.engines.replicas.replica_pool import Round
from torchtitan.rollout.flow.journal import decode_batch, encode_batch
from torchtitan.rollout.types import Batch


class Kind(enum.Enum):
    """The next action of all ranks, as one byte on the wire."""

    BATCH = b"B"
    """train on the batch that comes with the command"""
    EVALUATE = b"L"
    """compute the loss of the held-out batch that comes with the command"""
    GENERATE = b"G"
    """generate on the trainer's own devices for a while, as specified by the round in the command"""
    SNAPSHOT = b"S"
    """publish the pending version while there is no data"""
    WAIT = b"W"
    """do nothing yet; sent so that no collective exceeds its deadline"""
    EXPORT = b"E"
    """export a Hugging Face checkpoint"""
    STOP = b"X"
    """leave the loop"""
    DONE = b"D"
    """leave the loop as after the last step, because the goal is reached"""


@dataclass
class Command:
    kind: Kind
    batch: Batch | None = None
    generation: Round | None = None


def share_command(command: Command | None) -> Command:
    """Share rank 0's command with all ranks (collective): the others pass None. Without other ranks, a no-op.

    Collectives never meet out of order because every rank acts on the same sequence of commands.
    """
    if device.world_size() == 1 and command is not None:
        return command
    if command is None:
        payload = broadcast_bytes(None)
        kind = Kind(payload[:1])
        batch = decode_batch(payload[1:]) if kind in (Kind.BATCH, Kind.EVALUATE) else None
        return Command(kind, batch, Round.decode(payload[1:]) if kind is Kind.GENERATE else None)
    content = encode_batch(command.batch) if command.batch else b""
    if command.generation is not None:
        content = command.generation.encode()
    broadcast_bytes(command.kind.value + content)
    return command
