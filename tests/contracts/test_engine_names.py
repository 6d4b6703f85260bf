"""Nothing outside of inference/engines knows an engine by its name: what differs is in its folder, behind its
descriptor (docs/adding_an_engine.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtitan.config.engines import engine_specs

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ROOT / "torchtitan" / "inference" / "engines"
NAMES = set(engine_specs())
# Methods that compare their argument with something.
COMPARING = ("get", "pop", "setdefault", "startswith", "endswith", "removeprefix", "removesuffix", "index", "count")


def texts(node: ast.AST) -> set[str]:
    """The strings in an expression."""
    return {part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def knows_name(node: ast.AST) -> bool:
    """Whether this node of a syntax tree compares with an engine's name, or looks something up by it."""
    if isinstance(node, ast.Compare):
        parts = [node.left, *node.comparators]
        return bool(set[str]().union(*map(texts, parts)) & NAMES)
    if isinstance(node, (ast.MatchValue, ast.MatchMapping)):
        return bool(texts(node) & NAMES)
    if isinstance(node, ast.Dict):
        return bool({text for key in node.keys if key is not None for text in texts(key)} & NAMES)
    if isinstance(node, ast.Subscript):
        # Also the values of a Literal.
        return bool(texts(node.slice) & NAMES)
    if isinstance(node, ast.Call):
        function = node.func
        named = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        compares = named in COMPARING or named in ("Names", "load_engine")
        keywords = named == "dict" and bool({keyword.arg for keyword in node.keywords} & NAMES)
        return keywords or (compares and any(texts(argument) & NAMES for argument in node.args))
    if isinstance(node, ast.ImportFrom):
        imported = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        return any(f".engines.{name}" in f"{module}." for module in imported for name in (f"{n}." for n in NAMES))
    if isinstance(node, ast.Import):
        return any(f".engines.{name}." in f"{alias.name}." for alias in node.names for name in NAMES)
    return False


def found_in(source: str) -> Iterator[int]:
    """The lines that know an engine's name."""
    return (node.lineno for node in ast.walk(ast.parse(source)) if knows_name(node) and hasattr(node, "lineno"))


def test_nothing_outside_of_the_engines_compares_with_an_engines_name() -> None:
    files = [file for file in sorted((ROOT / "torchtitan").rglob("*.py")) if ENGINES not in file.parents]
    assert len(files) > 200
    found = [f"{file.relative_to(ROOT)}:{line}" for file in files for line in found_in(file.read_text())]
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        'backend == "vllm"',
        '"sglang" != backend',
        'backend in ("vllm", "sglang")',
        'config.inference.backend != "colocated"',
        'match backend:\n    case "embedded":\n        pass',
        'match backend:\n    case "vllm" | "sglang":\n        pass',
        '{"vllm": 1}[backend]',
        'table["sglang"]',
        'table.get("sglang")',
        'backend.startswith("vllm")',
        "dict(vllm=1)",
        'backend: Literal["vllm", "sglang"]',
        'backend: Annotated[str, Names(("embedded", "vllm"))]',
        'load_engine("vllm")',
        "from torchtitan.inference.engines.vllm import engine",
        "from torchtitan.inference.engines import sglang",
        "import torchtitan.inference.engines.vllm.engine",
    ],
)
def test_the_walk_sees_each_way_to_know_a_name(source: str) -> None:
    assert list(found_in(source))


@pytest.mark.parametrize(
    "source",
    [
        'backend: str = "embedded"',
        'text = f"needs inference.backend {backend}, such as vllm"',
        "from torchtitan.inference.engines.registry import engine_of",
        'NAMES = {"use_vllm": "inference.backend"}',
    ],
)
def test_the_walk_passes_over_what_only_mentions_a_name(source: str) -> None:
    assert not list(found_in(source))
