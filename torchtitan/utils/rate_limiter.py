"""Token buckets: how much one peer may cause at once, and per second from then on."""

from __future__ import annotations

# What all names that can be made up may cause together, in shares of one name; and how many names are remembered.
SHARES_OF_UNTRUSTED_NAMES, MAX_NAMES = 64, 8192


class RateLimiter:
    """A token bucket of `burst` tokens that fills by `per_second`; all users of one limiter share it.

    parent: another limiter from which the same amounts are taken.
    """

    def __init__(self, burst: float, per_second: float, parent: RateLimiter | None = None) -> None:
        self._burst, self._per_second, self._parent = burst, per_second, parent
        self._available, self._refilled_at = burst, 0.0

    def wait_s(self, now: float) -> float:
        """Return after how many seconds something is available again."""
        refilled = self._available + (now - self._refilled_at) * self._per_second
        self._available, self._refilled_at = min(self._burst, refilled), now
        # Rounding may leave a debt that is too small for the clock.
        wait_s = 0.0 if self._available > -1e-3 else -self._available / self._per_second
        if self._parent is None:
            return wait_s
        return max(wait_s, self._parent.wait_s(now))

    def spend(self, amount: float) -> None:
        """Count what has been caused. It may exceed what is available; the debt is then paid off."""
        self._available -= amount
        if self._parent is not None:
            self._parent.spend(amount)


class RateLimiters:
    """A limiter for each name. Only names that begin with `trusted_prefix` cannot be made up: a peer that has used up
    the limit of one name could come back under another, so all others also share one limiter."""

    def __init__(self, burst: float, per_second: float, trusted_prefix: str):
        self._burst, self._per_second, self._trusted_prefix = burst, per_second, trusted_prefix
        shares = SHARES_OF_UNTRUSTED_NAMES
        self._untrusted = RateLimiter(shares * burst, shares * per_second)
        self._limiters: dict[str, RateLimiter] = {}

    def of(self, name: str) -> RateLimiter:
        """Return the limiter of this name."""
        if name not in self._limiters:
            if len(self._limiters) >= MAX_NAMES:
                oldest = next(iter(self._limiters))
                del self._limiters[oldest]
            parent = None if name.startswith(self._trusted_prefix) else self._untrusted
            self._limiters[name] = RateLimiter(self._burst, self._per_second, parent)
        return self._limiters[name]
