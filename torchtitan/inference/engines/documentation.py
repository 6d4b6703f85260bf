"""The table of all engines in docs/engines.md, from what each says of itself:

python -m torchtitan.inference.engines.documentation
"""

from __future__ import annotations

from torchtitan.config.engines import EngineSpec
from torchtitan.inference.engines.registry import all_engines

TITLES = (
    "runs in",
    "its Python",
    "more than one device per model",
    "weights change while requests run",
    "adapters only (`lora.rank`)",
    "how its weights are verified",
    "sleep while the trainer trains (`inference.sleep_level`)",
)
"""The first cell of each row. EngineDescriptor.documentation has a cell for each."""


def engines_table() -> str:
    """Return the table as Markdown, a column for each engine: first those of the default mode."""
    engines = sorted(all_engines(), key=lambda engine: (engine.spec.mode != EngineSpec.mode, engine.spec.name))
    lines = [["", *(_heading(engine.spec) for engine in engines)], ["---"] * (1 + len(engines))]
    lines += [[title, *(engine.documentation[title] for engine in engines)] for title in TITLES]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _heading(spec: EngineSpec) -> str:
    if spec.mode == EngineSpec.mode:
        return f"`{spec.backend}`"
    return f'`{spec.backend}`, `inference.mode = "{spec.mode}"`'


if __name__ == "__main__":
    print(engines_table(), end="")
