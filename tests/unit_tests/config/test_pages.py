"""What the pages name is there: files, folders, links, headings, options of commands."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from torchtitan.config.job_config import free_table, known_keys

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TOP_FOLDERS = (
    "torchtitan", "tests", "benchmarks", "scripts", "examples", "train_configs", "deploy", "docs", ".ci"
)  # fmt: skip
# What the reader writes, what a run writes, and placeholders: a page says so where it names them.
OF_THE_READER = (
    r"my_\w+\.py|my\.toml|scenario\.toml|file\.py|.*/(TASK\.toml|NAME)|config\.toml"
    r"|(configuration|modeling)_\*\.py"
)
# Scripts of earlier figures, which measurements.md names and says where they are.
IN_THE_HISTORY = ("measurements.md",)


@cache
def names() -> frozenset[str]:
    """Files and folders of the repository, each with all ends of its path: a/b/c.py, b/c.py, c.py."""
    found: set[str] = set()
    for folder in TOP_FOLDERS:
        for path in [ROOT / folder, *(ROOT / folder).rglob("*")]:
            parts = path.relative_to(ROOT).parts
            found.update("/".join(parts[start:]) for start in range(len(parts)))
    found.update(path.name for path in ROOT.iterdir() if path.is_file())
    return frozenset(found)


def is_there(name: str) -> bool:
    return any(fnmatch(known, name) for known in names()) if "*" in name else name in names()


def headings(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def written_on(page: Path) -> set[str]:
    """Files that a page has its reader write: a block of code begins with a comment that names each."""
    return set(re.findall(r"^```(?:python|toml)\n# (\S+)", page.read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"git show\s+\w+:\S+", "", text)
    named = set(re.findall(r"(?<![\w./<>-])((?:[\w*]+/)*[\w*-]+\.(?:py|toml|sh|slurm|c|lock))\b", text))
    named.update(re.findall(r"`((?:torchtitan|tests|benchmarks|scripts|examples|deploy)(?:/\w+)+)/?`", text))
    missing = {name for name in named if not re.fullmatch(OF_THE_READER, name) and not is_there(name)}
    missing -= {name for name in missing for path in written_on(page) if path.startswith(name)}
    if page.name in IN_THE_HISTORY:
        missing = {name for name in missing if "/" in name}
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        file, _, heading = target.partition("#")
        aim = page.parent / file if file else page
        if not target.startswith("http") and not (aim.exists() and (not heading or heading in headings(aim))):
            missing.append(target)
    assert not missing


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "config"], ids=lambda page: page.stem)
def test_options_of_a_pages_commands_are_keys(page: Path) -> None:
    """Those beside the keys in backticks, which test_reading.py looks up."""
    named = set(re.findall(r"--([a-z_]+\.[a-z_0-9.-]+)", page.read_text(encoding="utf-8")))
    # The page of engines makes one of its own.
    named -= {"inference.unigram.python"}
    assert not {key for key in named if key not in known_keys() and not free_table(key)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_modules_that_a_page_runs_are_there(page: Path) -> None:
    named = re.findall(
        r"python3? -m ((?:torchtitan|tests|examples|benchmarks)[\w.]*\w)", page.read_text(encoding="utf-8")
    )
    paths = {name.replace(".", "/") for name in named}
    missing = {path for path in paths if not is_there(f"{path}.py") and not is_there(f"{path}/__main__.py")}
    assert not {f"{path}.py" for path in missing} - written_on(page)


def test_commands_of_recipes_are_those_of_their_files() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    commands = re.findall(
        r"^ +((?:\w+=\S+ |PYTHON=\"[^\"]+\" )*CONFIG_FILE=(\S+) \./run_grpo\.sh)$", text, re.MULTILINE
    )
    assert len(commands) >= 4
    assert not {file for command, file in commands if command not in (ROOT / file).read_text(encoding="utf-8")}
