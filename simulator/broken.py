"""What a simulation raises where the protocol does not hold."""

from __future__ import annotations


class ProtocolBroken(AssertionError):
    """Something that must never happen has happened in a simulation."""
