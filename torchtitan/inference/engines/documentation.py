"""The table of all engines in docs/engines.md, from what each says of itself:

python -m torchtitan.inference.engines.documentation
"""

from __future__ import annotations

from torchtitan.inference.engines.registry import all_engines

TITLES = (
    "runs in",
    "its Python",
    "more than one device per model",
    "weights change while requests run",
    "adapters only (`lora.rank`)",
    "how its weights are verified",
    "sleep while the trainer trains (`sleep_level`)",
)
"""The first cell of each row. EngineDescriptor.documentation has a cell for each."""


def engines_table() -> str:
    """Return the table as Markdown, a column for each engine: first those with actors."""
    engines = sorted(all_engines(), key=lambda engine: (engine.spec.in_ranks, engine.spec.name))
    lines = [["", *(f"`{engine.spec.name}`" for engine in engines)], ["---"] * (1 + len(engines))]
    lines += [[title, *(engine.documentation[title] for engine in engines)] for title in TITLES]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    print(engines_table(), end="")
