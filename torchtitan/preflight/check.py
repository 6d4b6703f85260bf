"""A configuration under examination: what the rules look at, and where they put what they find."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchtitan.config.draft import Problem
from torchtitan.config.job_config import JobConfig
from torchtitan.config.toml import show


@dataclass
class Check:
    """One look at a whole configuration, whose values are each allowed by themselves."""

    config: JobConfig
    ranks: int
    planning: bool
    """Nothing will be started, so what a start needs is not looked for"""
    wrong: frozenset[str] = frozenset()
    """Keys that were refused before and hold their defaults now: what follows from them is not refused again"""
    problems: list[Problem] = field(default_factory=list)

    def refuse(self, key: str, when: object, text: str, value: object = None) -> None:
        """Refuse the value of `table.key` (or `value`, a part of it) where `when` is true."""
        if when:
            shown = show(self.get(key) if value is None else value)
            self.say(key, f"{key} = {shown} is not allowed: {text}")

    def say(self, key: str, text: str) -> None:
        """Note a problem in words of its own."""
        problem = Problem(key, text)
        if not problem.follows_from(self.wrong):
            self.problems.append(problem)

    def get(self, key: str) -> object:
        """The value of `table.key`."""
        table, _, name = key.partition(".")
        return getattr(getattr(self.config, table), name)
