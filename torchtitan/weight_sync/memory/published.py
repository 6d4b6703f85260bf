"""Which versions this launch has published, and with which digest. Rank 0 makes the memory and shares it with every
registry that it starts, so what a registry has announced is known to its successor and to the trainer."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection, Sequence

from torchtitan.weight_sync.memory.slots import anonymous_file

# So many versions are known; newer ones take the place of the oldest.
KNOWN_VERSIONS = 16_384
# A record: the version plus one (0: nothing) and the digest. The first record of the memory holds the newest version.
_RECORD = struct.Struct("<Q16s")


class PublishedVersions:
    """Version -> digest. One process writes, at most one other reads. descriptor: of the shared memory; None: memory of
    this object alone."""

    def __init__(self, descriptor: int | None = None):
        size = (KNOWN_VERSIONS + 1) * _RECORD.size
        self._map = mmap.mmap(-1 if descriptor is None else descriptor, size)
        self._bytes = memoryview(self._map)

    @staticmethod
    def new_file() -> int:
        """Return a descriptor of memory in which no version is published."""
        return anonymous_file("weight-sync-published", (KNOWN_VERSIONS + 1) * _RECORD.size)

    def add(self, version: int, digest: str) -> None:
        """Record that `version` is published. Call it before anybody is told of the version."""
        place = self._place(version)
        # A reader finds the record of no version until the digest is whole.
        _RECORD.pack_into(self._bytes, place, 0, bytes(16))
        _RECORD.pack_into(self._bytes, place, 0, bytes.fromhex(digest))
        self._set(place, version)
        if version > self.newest:
            self._set(0, version)

    @property
    def newest(self) -> int:
        """The newest published version; -1 if there is none."""
        return int.from_bytes(self._bytes[:8], "little") - 1

    def digest(self, version: int) -> str | None:
        """Return the digest of `version`; None if it was not published, or so long ago that it is not known (see
        is_forgotten)."""
        found, digest = _RECORD.unpack_from(self._bytes, self._place(version))
        return digest.hex() if found == version + 1 and version >= 0 else None

    def settle(self, taken: dict[int, int], dropped: Collection[Sequence[int]]) -> tuple[list[int], list[int]]:
        """Take the versions whose fate is known out of `taken` (version -> serial of its snapshot); dropped: (serial,
        version) of snapshots that were. Returns the published ones, and those that a newer one has overtaken: nobody is
        told of them any more."""
        published, overtaken, newest = [], [], self.newest
        for version, serial in list(taken.items()):
            if version in self:
                published.append(version)
            elif version < newest:
                overtaken.append(version)
            elif not any(tuple(pair) == (serial, version) for pair in dropped):
                continue
            del taken[version]
        return published, overtaken

    def is_forgotten(self, version: int) -> bool:
        """Return whether `version` is so old that nobody can say any more whether it was published."""
        return 0 <= version <= self.newest - KNOWN_VERSIONS

    def __contains__(self, version: int) -> bool:
        """Return whether `version` is known to be published."""
        return self.digest(version) is not None

    def _place(self, version: int) -> int:
        return (1 + version % KNOWN_VERSIONS) * _RECORD.size

    def _set(self, place: int, version: int) -> None:
        self._bytes[place : place + 8] = (version + 1).to_bytes(8, "little")
