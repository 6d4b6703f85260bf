"""Prometheus' text format, version 0.0.4: https://prometheus.io/docs/instrumenting/exposition_formats/"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Figure(NamedTuple):
    """One value. A name that ends in `_total` is a counter's, any other a gauge's."""

    name: str
    value: float
    labels: Mapping[str, str] = {}


def exposition(figures: Iterable[Figure]) -> str:
    """Return the text of all figures. Characters that names may not have become `_`."""
    kinds: dict[str, list[str]] = {}
    for name, value, labels in figures:
        allowed = re.sub(r"[^a-zA-Z0-9_]", "_", name)
        pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        kinds.setdefault(allowed, []).append(f"{allowed}{{{pairs}}} {value}" if pairs else f"{allowed} {value}")
    lines: list[str] = []
    for name, samples in kinds.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# TYPE {name} {kind}", *samples]
    return "".join(f"{line}\n" for line in lines)


def numbers_in(values: Mapping[str, Any], prefix: str = "") -> list[Figure]:
    """Return the numbers of nested tables as figures: {"weights": {"version": 3}} is weights_version 3."""
    found: list[Figure] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            found += numbers_in(value, f"{prefix}{key}_")
        elif isinstance(value, (int, float)):
            found.append(Figure(f"{prefix}{key}", float(value)))
    return found


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
