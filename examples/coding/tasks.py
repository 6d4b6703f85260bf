"""Coding tasks: small packages, each with one generated bug, a git repository for the agent, and hidden tests.

    python -m examples.coding.tasks --count 60 --seed 0     writes bugs.jsonl anew, whose rows are the dataset

A bug is one change of scripts/mutate.py in the package's code. It is kept if it changes what a call of the hidden cases
returns, without hanging, and if the hidden tests then fail as they will in an episode. The issue that the agent reads
names one such call; the other cases stay hidden.
"""

import argparse
import ast
import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path

from examples.coding import sandbox
from scripts.mutate import mutants_of

HERE = Path(__file__).resolve().parent
DATASET = HERE / "bugs.jsonl"
PACKAGES = ("formulas", "intervals", "tables")
# Of the hidden cases in a bug's search, and of the hidden tests in an episode.
DEADLINE_S, JUDGE_S = 5.0, 60.0
# The longest result that an issue quotes.
QUOTED = 200

# Evaluates calls, the keys of the JSON object that it reads, and prints the object with what they return.
EVALUATE = """
import json, sys

def outcome(call):
    try:
        return repr(eval(call, dict(vars(package))))
    except Exception as error:
        return type(error).__name__

source, calls = json.load(sys.stdin)
package = type(sys)("package")
exec(source, vars(package))
print(json.dumps({call: outcome(call) for call in calls}))
"""
HIDDEN_TEST = """
import json
from pathlib import Path

import pytest

import {package}

CASES = json.loads(Path(__file__).with_name("cases.json").read_text())


@pytest.mark.parametrize("call", CASES)
def test_case(call):
    try:
        result = repr(eval(call, dict(vars({package}))))
    except Exception as error:
        result = type(error).__name__
    assert result == CASES[call]
"""


def rows():
    """Return the dataset: 60 rows with the issue as the prompt."""
    return [json.loads(line) for line in DATASET.read_text().splitlines()]


def code_of(package):
    """Return the file with a package's unbroken code."""
    return HERE / "packages" / package / "code.py"


def cases(package):
    """Return {call: what it returns} of a package's hidden cases: its repr, or the name of its exception."""
    return json.loads((HERE / "packages" / package / "cases.json").read_text())


def broken(package, line, change):
    """Return a package's code with one bug: a line of its code, and what scripts/mutate.py calls the change."""
    for mutant in mutants_of(code_of(package)):
        if (mutant.line, mutant.what) == (line, change):
            mutant.apply()
            return ast.unparse(ast.fix_missing_locations(mutant.tree)) + "\n"
    raise ValueError(f"{package} has no such bug: line {line}, {change}")


def repository(row):
    """Return {path: text} of the repository that the agent gets for a row of the dataset."""
    package = row["package"]
    source = broken(package, row["line"], row["change"])
    visible = (HERE / "packages" / package / "visible.py").read_text()
    return {f"{package}/__init__.py": source, f"tests/test_{package}.py": visible, "conftest.py": ""}


async def solved(package, files, python):
    """Return whether files {path: text} that an agent has left pass the hidden tests, in a sandbox of their own.

    Only the package's code is taken, so that nothing else (a conftest.py, say) can change the tests.
    """
    hidden = cases(package)
    kept = {path: text for path, text in files.items() if path.startswith(f"{package}/") and path.endswith(".py")}
    kept |= {"test_hidden.py": HIDDEN_TEST.format(package=package), "cases.json": json.dumps(hidden)}
    # The report is read, not the exit code: code under test could end the process.
    options = ["-q", "--tb=no", "--no-summary", "-p", "no:cacheprovider", "--junitxml=report.xml"]
    command = ["python", "-m", "pytest", *options, "test_hidden.py"]
    try:
        done = await sandbox.run(python, kept, command, "report.xml", timeout_s=JUDGE_S)
    except TimeoutError:
        return False
    report = done.files.get("report.xml", "")
    return f'errors="0" failures="0" skipped="0" tests="{len(hidden)}"' in report


def outcomes(source, calls):
    """Return {call: what it returns}; None if the code cannot be imported or hangs."""
    command = [sys.executable, "-I", "-c", EVALUATE]
    try:
        asked = json.dumps([source, list(calls)])
        done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        return None
    return json.loads(done.stdout) if done.returncode == 0 else None


def find_bugs(package, count, rng, python):
    """Yield `count` rows of a package, drawn at random among the bugs that the hidden tests find."""
    expected = cases(package)
    changes = sorted({(mutant.line, mutant.what) for mutant in mutants_of(code_of(package))})
    for line, change in rng.sample(changes, len(changes)):
        found = outcomes(broken(package, line, change), expected) or {}
        wrong = [call for call in found if found[call] != expected[call] and len(found[call]) < QUOTED]
        row = {"package": package, "line": line, "change": change}
        if not wrong or asyncio.run(solved(package, repository(row), python)):
            continue
        call = rng.choice(wrong)
        issue = (
            f"The Python package `{package}` in the current directory has a bug: `{call}` gives `{found[call]}`, but "
            f"it has to give `{expected[call]}`. Find the cause in the code and repair it there. Other calls with the "
            "same cause have to be right, too, and the docstrings say what is right. Do not change the tests."
        )
        yield {"prompt": issue, **row}
        count -= 1
        if not count:
            return
    raise SystemExit(f"{package} has {count} bugs too few")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    python, found = sandbox.agent_python(), []
    for number, package in enumerate(PACKAGES):
        rng = random.Random(f"{options.seed} {package}")
        unbroken = {f"{package}/__init__.py": code_of(package).read_text()}
        if not asyncio.run(solved(package, unbroken, python)):
            raise SystemExit(f"{package} does not pass its own hidden tests")
        count = (options.count + number) // len(PACKAGES)
        found += find_bugs(package, count, rng, python) if count else []
    random.Random(options.seed).shuffle(found)
    DATASET.write_text("".join(json.dumps(row) + "\n" for row in found))


if __name__ == "__main__":
    main()
