"""What is known of each transport (weight_sync.transport) before it runs, in one place. Configurations are checked and
memory is estimated with it, without torch; the transport is a class in torchtitan/weight_sync/transports/ of the same
name. To add one, see docs/adding_a_transport.md."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from typing import Annotated

from pydantic.dataclasses import dataclass as table

from torchtitan.config.values import TABLE, Range


class TransportTable:
    """What a run asks of the table of any transport, [weight_sync.NAME]. A table has fields for what can be chosen; the
    rest is as here."""

    delta: bool = False
    relay: bool = False
    connections: int = 1
    path: str = ""


@table(config=TABLE)
class Deltas(TransportTable):
    """The table of a transport that can send deltas."""

    delta: bool = False
    """Send only the elements that changed since the version that the actor holds; needs one more slot"""


@table(config=TABLE)
class Tcp(Deltas):
    """What tcp has."""

    relay: bool = False
    """Actors that hold a version pass it on: each host receives it once, and two of them from the trainer; on a host,
    two actors receive from one actor"""

    connections: Annotated[int, Range(1, 16)] = 1
    """Connections from an actor to each shard server, each with a thread at both ends; more than one pays where the
    network moves more than the 3 GB/s that a thread receives"""


@table(config=TABLE)
class Disk(Deltas):
    """What disk has."""

    path: str = ""
    """What trainer and actors share, a folder or a URL that fsspec knows (s3://bucket/prefix, with the extra `remote`),
    for this job alone; empty is weights/ in the run folder"""


@dataclass(frozen=True)
class Descriptor:
    """One transport."""

    about: str
    """What the bytes of a bucket take, for the reference of the configuration"""
    table: type[TransportTable] = TransportTable
    """Its table, if it has keys that others have not"""
    on_device: bool = False
    """Whether it reads parameters and fills staging memory on their GPU, if they are on one"""
    over_channel: bool = False
    """Whether the bytes cross the connection to the shard server, where a delta or an actor's copy can replace them"""
    sends: bool = False
    """Whether the shard server sends the bytes itself, and so sees how many an actor has taken"""


TRANSPORTS: dict[str, Descriptor] = {
    "tcp": Descriptor("host memory and sockets", Tcp, over_channel=True, sends=True),
    "disk": Descriptor("files in a folder or an object store", Disk),
    "ipc": Descriptor("memory shared on one machine", on_device=True),
    "nccl": Descriptor("a communicator per actor worker; gloo without CUDA", on_device=True, sends=True),
}
MEANING = f"How weights travel: {', '.join(f'{name} ({facts.about})' for name, facts in TRANSPORTS.items())}"


def transport_tables() -> dict[str, type[TransportTable]]:
    """Return the tables of all transports that have keys of their own, by the transports' names."""
    return {name: facts.table for name, facts in TRANSPORTS.items() if is_dataclass(facts.table)}
