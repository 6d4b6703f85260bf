"""The shell commands of README.md and docs/: those in blocks, and those that a sentence has in backticks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# A block of a shell, or one without a language, which may hold something else (a drawing, what a command prints).
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
IN_A_SENTENCE = re.compile(r"`([^`]+)`", re.DOTALL)
PROGRAM = r"(?:\w+=\S* +)*(?:\./|scripts/|benchmarks/|\.venv/bin/|python3? |torchrun |torchtitan-grpo|CONFIG_FILE=)"
# What the reader writes on a page begins with a comment that names its file.
WRITTEN = re.compile(r"^```(?:python|toml)\n# ([\w/]+\.(?:py|toml))\b[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A command as it stands on a page, in one line and without its comment."""

    page: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def commands_of(page: Path) -> list[Command]:
    """All commands of a page, each once, in their order."""
    text, found = page.read_text(encoding="utf-8"), list[str]()
    for _, language, block in BLOCK.findall(text):
        if language in ("bash", "sh", "") and (language or re.search(rf"^ *{PROGRAM}", block, re.MULTILINE)):
            found += lines_of(block)
    prose = BLOCK.sub("", text)
    for span in IN_A_SENTENCE.findall(prose):
        line = " ".join(span.split())
        # A path alone names a file.
        if re.match(PROGRAM, line) and (" " in line or line == "./run_grpo.sh"):
            found.append(line)
    return [Command(page.name, line) for line in dict.fromkeys(found)]


def lines_of(block: str) -> list[str]:
    """The commands of a block: a loop is one, and what && joins are several."""
    block = re.sub(r"\\\n\s*", " ", block)
    block = re.sub(r"(?m)(^|\s)#.*$", "", block)
    block = re.sub(r"\bfor .*?^done\b.*?$", lambda loop: " ".join(loop[0].split()), block, flags=re.M | re.S)
    commands = []
    for line in block.splitlines():
        parts = [line] if line.strip().startswith("for ") else line.split(" && ")
        commands += [" ".join(part.split()) for part in parts if part.strip()]
    return commands


def files_of(page: Path) -> dict[str, str]:
    """Name -> content of each file that a page has its reader write."""
    return dict(WRITTEN.findall(page.read_text(encoding="utf-8")))
