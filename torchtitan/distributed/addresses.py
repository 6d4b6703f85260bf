"""Which of this machine's addresses the ranks talk over. Says it, and refuses one that other machines cannot reach."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping

import psutil

from torchtitan.errors import UserError
from torchtitan.utils.machine import is_loopback

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"


def choose_interface(wanted: str, leader: str) -> str:
    """Have gloo use an interface, and NCCL too where `wanted` (comm.interface) names it; for ranks on several machines.

    Without a name it is GLOO_SOCKET_IFNAME's, or the one by which this machine reaches `leader` (rank 0's MASTER_ADDR).
    NCCL is left its own choice then: it looks for InfiniBand first.

    Returns:
        The address and its interface, such as "10.0.0.8 (ib0)".

    Raises:
        UserError: there is no such interface here, it has no address, or other machines cannot reach it.
    """
    here = _addresses()
    name = wanted or os.environ.get(GLOO_VARIABLE, "")
    listed = ", ".join(f"{other} {address}" for other, address in here.items())
    if name and name not in here:
        raise UserError(
            f"comm.interface = {name!r}: {socket.gethostname()} has no such interface with an address, only: {listed}"
        )
    if not name:
        own = _address_towards(leader)
        name = next((other for other, address in here.items() if address == own), "lo")
        if ipaddress.ip_address(here.get(name, own)).is_loopback and not is_loopback(leader):
            raise UserError(
                f"rank 0's address {leader!r} is {own} on {socket.gethostname()} itself (see /etc/hosts), where other "
                f"machines reach nothing: set comm.interface to one of: {listed}"
            )
    os.environ[GLOO_VARIABLE] = name
    if wanted:
        os.environ[NCCL_VARIABLE] = f"={wanted}"  # that one exactly, not all that begin so
    return f"{here.get(name, leader)} ({name})"


def _addresses() -> Mapping[str, str]:
    """The address of each interface that is up: IPv4 where it has one."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = {}
    for name, addresses in psutil.net_if_addrs().items():
        usable = [one for one in addresses if one.family in families and "%" not in one.address]
        for one in sorted(usable, key=lambda one: families.index(one.family))[:1]:
            found[name] = one.address
    return found


def _address_towards(leader: str) -> str:
    """The address that packets to `leader` would leave with. Nothing is sent."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(leader, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(f"rank 0's address {leader!r} cannot be found from {socket.gethostname()}: {error}") from error
