"""What stays of sequences for others that begin with the same tokens: the next turn of a conversation, or the other
samples of a group."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torchtitan.inference.engines.embedded.sequences import Sequence

# Beginnings are looked up in steps of so many tokens; a shorter one is computed again.
STEP = 16
# Of those that begin with the same steps, so many of the latest are compared token by token.
MAX_COMPARED = 32


@dataclass(eq=False)
class Prefix:
    """The beginning of a sequence: its prompt while it runs, all of it afterwards."""

    token_ids: np.ndarray
    """[tokens] int64"""
    sequence: Sequence | None
    """Whose row of the cache holds the keys and values, while it runs"""
    computed: bool = False
    """Whether they are there yet"""
    copy: list[torch.Tensor] = field(default_factory=list)
    """Afterwards: what KeyValueCache.read_row gave"""
    routes: np.ndarray | None = None
    """Afterwards: the experts of each token, where they are known from the first on"""
    hashes: list[int] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Memory of the copy."""
        routes = 0 if self.routes is None else self.routes.nbytes
        return sum(tensor.nbytes for tensor in self.copy) + routes


class PrefixStore:
    """Finds the longest beginning that is there already."""

    def __init__(self) -> None:
        self._index: dict[int, dict[Prefix, None]] = {}
        """Hash of the first STEP, 2 × STEP, ... tokens -> all that begin so, the latest last"""
        self._copies: dict[Prefix, None] = {}
        """Those of sequences that have ended, the least recently used first"""
        self._bytes = 0

    def find(self, token_ids: np.ndarray, accepts: Callable[[Prefix], bool] | None = None) -> tuple[Prefix | None, int]:
        """(what begins with the most of these tokens, how many it has of them). accepts: only what has no other tokens,
        and for which this is true."""
        alike: dict[Prefix, None] = {}
        for value in _hashes(token_ids):
            if value not in self._index:
                break
            alike = self._index[value]
        found, most = None, 0
        for prefix in itertools.islice(reversed(alike), MAX_COMPARED):
            common = _common(prefix.token_ids, token_ids)
            fits = accepts is None or (common == len(prefix.token_ids) and accepts(prefix))
            if common > most and fits:
                found, most = prefix, common
        if found in self._copies:
            self._copies[found] = self._copies.pop(found)
        return found, most

    def begin(self, token_ids: np.ndarray, sequence: Sequence) -> Prefix:
        """The prompt of a sequence, which is going to be computed in its row."""
        prefix = Prefix(token_ids, sequence)
        self._register(prefix)
        return prefix

    def keep(self, token_ids: np.ndarray, copy: list[torch.Tensor], routes: np.ndarray | None = None) -> None:
        """The sequence has ended; what it began as is part of this, and need not be kept as well."""
        older, shared = self.find(token_ids)
        if older is not None and older.sequence is None and shared == len(older.token_ids):
            self.drop(older)
        prefix = Prefix(token_ids, None, True, copy, routes)
        self._register(prefix)
        self._copies[prefix] = None
        self._bytes += prefix.bytes

    def drop(self, prefix: Prefix) -> None:
        """Forget this one; one that is forgotten already may be given."""
        for value in prefix.hashes:
            alike = self._index.get(value, {})
            alike.pop(prefix, None)
            if not alike:
                self._index.pop(value, None)
        if prefix in self._copies:
            del self._copies[prefix]
            self._bytes -= prefix.bytes

    def trim(self, limit: int) -> None:
        """Drop the least recently used copies until they take at most `limit` bytes."""
        while self._copies and self._bytes > limit:
            self.drop(next(iter(self._copies)))

    def clear(self) -> None:
        """Forget everything."""
        self._index.clear()
        self._copies.clear()
        self._bytes = 0

    def _register(self, prefix: Prefix) -> None:
        prefix.hashes = _hashes(prefix.token_ids)
        for value in prefix.hashes:
            self._index.setdefault(value, {})[prefix] = None


def _hashes(token_ids: np.ndarray) -> list[int]:
    """Of the first STEP, 2 × STEP, ... tokens. Unequal tokens may share one: what is found has to be compared."""
    values, value = [], 0
    for end in range(STEP, len(token_ids) + 1, STEP):
        value = hash((value, token_ids[end - STEP : end].tobytes()))
        values.append(value)
    return values


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """With how many equal tokens both begin."""
    length = min(len(first), len(second))
    differing = np.flatnonzero(first[:length] != second[:length])
    return int(differing[0]) if len(differing) else length
