"""The task of the two command-line agents: to write one word into a file. A reward needs no judge for it.

    dataset = "examples.cli_agents.task:rows"

The tests of a real data set would stand in place of `reward`.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

WORDS = ("apple", "bread", "cloud", "drum", "eagle", "flute", "grape", "house")
FILE = "answer.txt"
# What `npm install --prefix outputs/agents …` makes, seen from where the run was started.
PROGRAMS = Path("outputs/agents/node_modules/.bin")


def rows():
    """Return the data set: a prompt, and the word that the file has to hold."""
    return [{"prompt": f"Write the word {word} into the file {FILE}.", "word": word} for word in WORDS]


def program(name):
    """Return the path of an agent's program. Exits with a message where npm has not installed it."""
    found = (PROGRAMS / name).absolute()
    if not found.exists():
        sys.exit(f"{found} is missing: see docs/cli_agents.md for the npm command that installs it")
    return str(found)


@contextmanager
def episode():
    """Give the row of an episode and a folder of its own, which the agent takes for its home and works in."""
    row = json.loads(sys.stdin.readline())
    folder = Path(tempfile.mkdtemp(prefix="episode-"))
    try:
        (folder / "work").mkdir()
        yield row, folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(command, folder, **variables):
    """Run an agent in the episode's folder. Returns what it answered at its end; what it wrote to standard error is in
    environments.log."""
    environment = {**os.environ, "HOME": str(folder), **variables}
    work = folder / "work"
    done = subprocess.run(
        command, cwd=work, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    print(f"{Path(command[0]).name} ended with exit code {done.returncode}: {done.stdout[-200:]!r}", file=sys.stderr)
    return done.stdout


def reward(row, folder, answer):
    """Return 1.0 for the right word in the right file, 0.2 for the file alone, 0.1 for an answer that names the word,
    otherwise 0.0: a small model that calls no tool yet has something to learn from."""
    path = folder / "work" / FILE
    if path.is_file():
        return 1.0 if path.read_text(errors="replace").strip() == row["word"] else 0.2
    return 0.1 if row["word"] in answer else 0.0
