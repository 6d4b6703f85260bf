"""Tables by kind: [inference.vllm] holds what only one value of inference.backend has a use for, [weight_sync.disk]
what only one value of weight_sync.transport has. A file may have tables of kinds that it does not choose: they are
checked and unused, so that one option switches the kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TypeVar

CHOSEN_BY = {"inference": "inference.backend", "weight_sync": "weight_sync.transport"}
"""A table that has tables by kind -> the key that chooses one of them"""
Kind = TypeVar("Kind")


def with_tables(tables: Mapping[str, type]) -> Callable[[type[Kind]], type[Kind]]:
    """Return a decorator, to stand under @dataclass, that gives a class a field for the table of each kind."""

    def add(holder: type[Kind]) -> type[Kind]:
        for name, table in tables.items():
            holder.__annotations__[name] = table
            setattr(holder, name, field(default_factory=table))
        return holder

    return add


def chooser_of(table: str) -> tuple[str, str]:
    """Return the key that chooses this table by its kind, and the value with which it does; ("", "") for a table that
    is always in use."""
    above, _, kind = table.rpartition(".")
    chosen_by = CHOSEN_BY.get(above, "")
    return (chosen_by, kind) if chosen_by else ("", "")
