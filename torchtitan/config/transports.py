"""What is known of each transport (weight_sync.transport) before it runs, in one place. Configurations are checked and
memory is estimated with it, without torch; the transport is a class in torchtitan/weight_sync/transports/ of the same
name. To add one, see docs/adding_a_transport.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Descriptor:
    """One transport."""

    about: str
    """What the bytes of a bucket take, for the reference of the configuration"""
    on_device: bool = False
    """Whether it reads parameters and fills staging memory on their GPU, if they are on one"""
    over_channel: bool = False
    """Whether the bytes cross the connection to the shard server, where a delta or an actor's copy can replace them"""
    sends: bool = False
    """Whether the shard server sends the bytes itself, and so sees how many an actor has taken"""
    own_deltas: bool = False
    """Whether it makes deltas itself"""


TRANSPORTS: dict[str, Descriptor] = {
    "tcp": Descriptor("host memory and sockets", over_channel=True, sends=True),
    "disk": Descriptor("files in a folder or an object store", own_deltas=True),
    "ipc": Descriptor("memory shared on one machine", on_device=True),
    "nccl": Descriptor("a communicator per actor worker; gloo without CUDA", on_device=True, sends=True),
}
MEANING = f"How weights travel: {', '.join(f'{name} ({facts.about})' for name, facts in TRANSPORTS.items())}"
