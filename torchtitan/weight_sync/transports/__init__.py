"""Transports by name. Each is loaded when it is first used: tcp and disk run in processes without torch."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from torchtitan.weight_sync.transports.base import ReceiveCarrier, ReceiveContext, SendCarrier, SendContext

# [weight_sync] transport -> module of this package, and what its two classes are called before SendCarrier and
# ReceiveCarrier.
TRANSPORTS = {
    "tcp": ("inline", "Inline"),
    "disk": ("disk", "Disk"),
    "ipc": ("shared_memory", "SharedMemory"),
    "nccl": ("collective", "Collective"),
}

# These read slots where the parameters are: the courier is a thread of the trainer's process, see courier_thread.py.
IN_TRAINER = frozenset({"ipc", "nccl"})


def send_carrier(kind: str, context: SendContext) -> SendCarrier:
    """The sender's half of transport `kind`. Raises ValueError for an unknown one."""
    return cast(SendCarrier, _factory(kind, "SendCarrier")(context))


def receive_carrier(kind: str, context: ReceiveContext) -> ReceiveCarrier:
    """The receiver's half of transport `kind`. Raises ValueError for an unknown one."""
    return cast(ReceiveCarrier, _factory(kind, "ReceiveCarrier")(context))


def _factory(kind: str, half: str) -> type:
    if kind not in TRANSPORTS:
        raise ValueError(f"unknown transport {kind!r}")
    module, prefix = TRANSPORTS[kind]
    factory: type = getattr(import_module(f"{__name__}.{module}"), prefix + half)
    return factory
