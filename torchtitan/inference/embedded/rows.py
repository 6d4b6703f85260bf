"""What the engine knows of its rows of the cache besides keys and values: counts, limits, and what was generated."""

from __future__ import annotations

import numpy as np

FIRST_WIDTH = 64


class Rows:
    """Arrays with an entry for each row; rows in use stand first, without gaps. On the host."""

    def __init__(self, count: int):
        self.lengths = np.zeros(count, np.int64)
        """Tokens in the cache"""
        self.generated = np.zeros(count, np.int64)
        """Tokens generated"""
        self.limits = np.zeros(count, np.int64)
        """Most tokens that may be"""
        self.last = np.zeros(count, np.int64)
        """The last one, which is not in the cache yet"""
        self.keys = np.zeros(count, np.uint64)
        """The stream of random numbers"""
        self._tokens = np.zeros((count, FIRST_WIDTH), np.int64)
        self._log_probs = np.zeros((count, FIRST_WIDTH), np.float32)

    def start(self, rows: slice, length: int, limit: int, keys: np.ndarray) -> None:
        """These rows begin with prompts of `length` tokens, and have room for `limit` more."""
        self.lengths[rows], self.generated[rows], self.limits[rows], self.keys[rows] = length, 0, limit, keys
        if limit > self._tokens.shape[1]:
            wider = ((0, 0), (0, limit - self._tokens.shape[1]))
            self._tokens, self._log_probs = np.pad(self._tokens, wider), np.pad(self._log_probs, wider)

    def add(self, first: int, token_ids: np.ndarray, log_probs: np.ndarray) -> None:
        """One more token for each row from `first` on; both [rows]."""
        used = slice(first, first + len(token_ids))
        rows = np.arange(used.start, used.stop)
        self._tokens[rows, self.generated[used]] = token_ids
        self._log_probs[rows, self.generated[used]] = log_probs
        self.last[used] = token_ids
        self.generated[used] += 1

    def tokens(self, row: int) -> np.ndarray:
        """[generated] int64"""
        return self._tokens[row, : self.generated[row]]

    def log_probs(self, row: int) -> np.ndarray:
        """[generated] float32"""
        return self._log_probs[row, : self.generated[row]]

    def move(self, source: int, target: int) -> None:
        """Row `source` takes the place of row `target`."""
        for state in (self.lengths, self.generated, self.limits, self.last, self.keys, self._tokens, self._log_probs):
            state[target] = state[source]
