"""This machine's addresses: by which ranks and actors of other machines reach it. No torch here."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Mapping

import psutil

from torchtitan.errors import UserError
from torchtitan.utils.machine import is_loopback

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"


def listen_at(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """Return a socket that listens; port 0: any free port. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)


def choose_interface(leader: str) -> str:
    """Make gloo use an interface; for ranks on several machines.

    The interface is GLOO_SOCKET_IFNAME, or the one by which this machine reaches `leader` (rank 0's MASTER_ADDR). NCCL
    reads NCCL_SOCKET_IFNAME, and otherwise chooses for itself, because it prefers InfiniBand.

    Returns:
        The address and its interface, such as "10.0.0.8 (ib0)".

    Raises:
        UserError: there is no such interface here, it has no address, or other machines cannot reach it.
    """
    local_addresses = _addresses()
    name = os.environ.get(GLOO_VARIABLE, "")
    listed = ", ".join(f"{other} {address}" for other, address in local_addresses.items())
    if name and name not in local_addresses:
        raise UserError(
            f"{GLOO_VARIABLE} = {name!r}: {socket.gethostname()} has no such interface with an address, only: {listed}"
        )
    if not name:
        own_address = address_towards(leader)
        name = next((other for other, address in local_addresses.items() if address == own_address), "lo")
        if ipaddress.ip_address(local_addresses.get(name, own_address)).is_loopback and not is_loopback(leader):
            raise UserError(
                f"rank 0's address {leader!r} is {own_address} on {socket.gethostname()} itself (see /etc/hosts), "
                f"where other machines reach nothing: set {GLOO_VARIABLE} to one of: {listed}"
            )
    os.environ[GLOO_VARIABLE] = name
    return f"{local_addresses.get(name, leader)} ({name})"


def _addresses() -> Mapping[str, str]:
    """The address of each interface that is up, preferably IPv4."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = {}
    for name, addresses in psutil.net_if_addrs().items():
        usable = [entry for entry in addresses if entry.family in families and "%" not in entry.address]
        for entry in sorted(usable, key=lambda entry: families.index(entry.family))[:1]:
            found[name] = entry.address
    return found


def address_towards(leader: str) -> str:
    """Return the source address of packets to `leader`. Nothing is sent. Raises UserError."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(leader, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(f"rank 0's address {leader!r} cannot be found from {socket.gethostname()}: {error}") from error


def reachable_host(host: str, peer: str) -> str:
    """Return the host that others should use to reach a listener on `host`: `host` itself or, if it is a wildcard, the
    local address that reaches the host `peer`."""
    with contextlib.suppress(ValueError, UserError):  # `host` is a name, or there is no route to the peer
        if ipaddress.ip_address(host).is_unspecified:
            return address_towards(peer)
    return host


def resolve_host(host: str, key: str) -> str:
    """Return the address that this key's host resolves to here, which others get in place of a name.

    Raises UserError, also for an address of loopback under another name.
    """
    own_name = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise UserError(f"{key} = {host} cannot be resolved on {own_name}: {error}") from error
    if is_loopback(address) and not is_loopback(host):
        raise UserError(
            f"{key} = {host} is {address} on {own_name} (/etc/hosts?), which no other machine reaches: give the "
            "address of a network interface, or 127.0.0.1 where everything runs on this machine"
        )
    return address
