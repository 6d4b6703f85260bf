"""How much of something one party may cause: so much at once, and so much per second from then on."""

from __future__ import annotations

# All names together that can be made up have the budget of so many, and so many budgets are remembered.
TOGETHER, MAX_NAMES = 64, 8192


class Budget:
    """`most` at once, and so much per second from then on; all users of one budget share it. within: another budget
    that pays as well."""

    def __init__(self, most: float, per_second: float, within: Budget | None = None) -> None:
        self._most, self._per_second, self._within = most, per_second, within
        self._left, self._at = most, 0.0

    def wait_s(self, now: float) -> float:
        """Return after how many seconds there is something left."""
        self._left = min(self._most, self._left + (now - self._at) * self._per_second)
        self._at = now
        # Rounding may leave a debt that is too small for the clock.
        wait_s = 0.0 if self._left > -1e-3 else -self._left / self._per_second
        return wait_s if self._within is None else max(wait_s, self._within.wait_s(now))

    def spend(self, amount: float) -> None:
        """Count what has been caused; the budget may be exceeded, and is then paid off."""
        self._left -= amount
        if self._within is not None:
            self._within.spend(amount)


class Budgets:
    """A budget for each name. Only names that begin with `own` cannot be made up: a peer that has used up the budget
    of another one could come back under a third, so these have one more budget for all of them together."""

    def __init__(self, most: float, per_second: float, own: str):
        self._limits, self._own = (most, per_second), own
        self._together = Budget(TOGETHER * most, TOGETHER * per_second)
        self._budgets: dict[str, Budget] = {}

    def of(self, name: str) -> Budget:
        """Return the budget of this name."""
        if name not in self._budgets:
            if len(self._budgets) >= MAX_NAMES:
                del self._budgets[next(iter(self._budgets))]
            self._budgets[name] = Budget(*self._limits, None if name.startswith(self._own) else self._together)
        return self._budgets[name]
