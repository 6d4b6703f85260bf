"""Runs a list of checks on GPUs, each with a deadline, and writes down what was expected and measured.

    python scripts/verify_gpu.py [--quick] [--checks FILE] [--folder DIR] [--minutes N] [--only NAME …] [--again]
                                 [--no-engines]

scripts/verify_gpu.sh calls it. The list is TOML, the most important checks first: a command of the shell, how many GPUs
it needs, its deadline, and what its output must say (`must_say`, a pattern). Lines of our benchmarks with a bar are
read as well: a missed bar is a check that has failed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tomli

ROOT = Path(__file__).resolve().parent.parent
# A command that is told to end gets so long.
GRACE_S = 20.0
BAR = re.compile(r"^(\S+)\s+(\S+)\s+(<=|>=) (\S+)\s+(met|MISSED)\s*$", re.MULTILINE)


@dataclass
class Check:
    """One of the list."""

    name: str
    command: str
    shows: str
    """In words, what it is for"""
    must_say: str
    """Pattern of the output; its group, or all of it, is what was measured"""
    gpus: int = 1
    minutes: float = 10.0
    memory_gb: float = 0.0
    """The least memory of a GPU, in 1e9 bytes"""
    engine: str = ""
    """What scripts/install_engine.sh installs for it"""

    def unfit(self, here: dict[str, Any], engines: bool) -> tuple[str, str] | None:
        """(status, why) if it is not run on this machine."""
        if self.gpus > len(here["gpus"]):
            return "left out", f"needs {self.gpus} GPUs"
        if self.memory_gb * 1e9 > smallest_memory(here["gpus"]):
            return "too small", f"these GPUs are too small for this part: it needs {self.memory_gb:g} GB"
        if self.engine and not engines:
            return "not run", f"needs {self.engine}, and --no-engines was given"
        return None


@dataclass
class Result:
    """What became of a check."""

    name: str
    status: str
    """passed, failed, late (its deadline was over), left out (too few GPUs), too small (their memory) or not run (no
    engine)"""
    expected: str = ""
    measured: str = ""
    seconds: float = 0.0
    figures: list[dict[str, Any]] = field(default_factory=list)
    """Bars of a benchmark: key, measured, relation, bar, met"""


def smallest_memory(gpus: list[str]) -> float:
    """Bytes of the smallest of these GPUs, as nvidia-smi lists them; those that say none have enough."""
    sizes = [re.search(r"(\d+) MiB$", line) for line in gpus]
    return min((int(size[1]) * 2.0**20 for size in sizes if size), default=float("inf"))


def read_checks(path: Path) -> list[Check]:
    return [Check(**entry) for entry in tomli.loads(path.read_text(encoding="utf-8"))["check"]]


def run_check(check: Check, log: Path) -> Result:
    """Run it in a process group of its own; nothing of it is left afterwards."""
    begun = time.monotonic()
    with log.open("w+b") as output:
        process = subprocess.Popen(
            ["bash", "-o", "pipefail", "-c", check.command],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        code: int | None = None
        try:
            code = process.wait(check.minutes * 60)
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGTERM)
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                print(f"[verify] {check.name} does not end by itself: it is killed", file=sys.stderr)
        finally:
            _signal(process, signal.SIGKILL)
            process.wait()
        output.seek(0)
        said = output.read().decode(errors="replace")
    figures = [
        {"key": key, "measured": float(value), "relation": relation, "bar": float(bar), "met": met == "met"}
        for key, value, relation, bar, met in BAR.findall(said)
    ]
    found = re.search(check.must_say, said)
    good = code == 0 and found is not None and all(figure["met"] for figure in figures)
    measured = found.group(found.lastindex or 0) if found else f"not said: {check.must_say}"
    if code is None:
        measured = f"not done after {check.minutes:g} minutes"
    elif code != 0:
        measured = f"exit code {code}, see {log}"
    status = "passed" if good else "late" if code is None else "failed"
    return Result(check.name, status, check.shows, measured, round(time.monotonic() - begun, 1), figures)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        os.killpg(process.pid, number)


def machine() -> dict[str, Any]:
    """What figures depend on."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    gpus = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.strip().splitlines()
    return {"gpus": gpus, "commit": checked_code(ROOT), "python": sys.version.split()[0]}


def checked_code(root: Path) -> str:
    """The commit of a checkout, and what its changes hash to if it has any; empty where git does not know it."""

    def git(*words: str) -> bytes:
        return subprocess.run(["git", *words], capture_output=True, timeout=60, check=False, cwd=root).stdout

    commit = git("describe", "--always").decode().strip()
    changes = git("diff", "HEAD")
    return f"{commit}-{hashlib.sha256(changes).hexdigest()[:12]}" if commit and changes else commit


def table(results: list[Result]) -> str:
    """Expected and measured, a line each; a benchmark's bars below it."""
    lines = []
    for result in results:
        lines.append(
            f"{result.status:8} {result.name:24} {result.seconds:7.0f} s  {result.expected}: {result.measured}"
        )
        for figure in result.figures:
            met = "" if figure["met"] else "   MISSED"
            lines.append(
                f"{'':8}   {figure['key']:32} {figure['relation']} {figure['bar']:<8g} {figure['measured']:g}{met}"
            )
    return "\n".join(lines)


def page(here: dict[str, Any], results: list[Result]) -> str:
    """The same as a table of Markdown, for docs/gpu.md."""
    lines = [f"{', '.join(here['gpus'])}; commit {here['commit']}; Python {here['python']}", ""]
    lines += ["| check | status | seconds | expected | measured |", "|---|---|---|---|---|"]
    for result in results:
        said = " ".join(result.measured.split()).replace("|", "/")
        lines.append(f"| `{result.name}` | {result.status} | {result.seconds:.0f} | {result.expected} | {said} |")
        for one in result.figures:
            status = "met" if one["met"] else "missed"
            lines.append(f"| … {one['key']} | {status} | | {one['relation']} {one['bar']:g} | {one['measured']:g} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="ten minutes: scripts/verify_gpu_quick.toml")
    parser.add_argument("--checks", type=Path, help="default: scripts/verify_gpu.toml")
    parser.add_argument("--folder", type=Path, help="default: outputs/verify_gpu")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no check after so long")
    parser.add_argument("--only", nargs="+", default=[], help="names of checks")
    parser.add_argument("--again", action="store_true", help="also what has passed before")
    parser.add_argument("--no-engines", action="store_true", help="leave out what needs vLLM or SGLang")
    arguments = parser.parse_args()
    name = "verify_gpu_quick" if arguments.quick else "verify_gpu"
    arguments.checks = arguments.checks or ROOT / "scripts" / f"{name}.toml"
    arguments.folder = arguments.folder or ROOT / "outputs" / name
    checks = read_checks(arguments.checks)
    if unknown := set(arguments.only) - {check.name for check in checks}:
        parser.error(f"--only {', '.join(sorted(unknown))}: the checks are {', '.join(check.name for check in checks)}")
    here = machine()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    file = arguments.folder / "results.json"
    before = json.loads(file.read_text()) if file.is_file() else {}
    same = before.get("machine") == here and not arguments.again
    known = {entry["name"]: Result(**entry) for entry in before.get("results", ())} if same else {}
    begun = time.monotonic()
    for check in checks:
        done = check.name in known and known[check.name].status == "passed"
        if done or (arguments.only and check.name not in arguments.only):
            continue
        if unfit := check.unfit(here, not arguments.no_engines):
            status, why = unfit
            known[check.name] = Result(check.name, status, check.shows, why)
        elif time.monotonic() - begun < arguments.minutes * 60:
            print(f"[verify] {check.name}: at most {check.minutes:g} minutes", file=sys.stderr, flush=True)
            known[check.name] = run_check(check, arguments.folder / f"{check.name}.log")
        # After every check, so that a machine that goes away leaves what it has shown.
        results = [known[one.name] for one in checks if one.name in known]
        whole = file.with_suffix(".tmp")
        whole.write_text(json.dumps({"machine": here, "results": [asdict(one) for one in results]}, indent=1))
        whole.replace(file)
    results = [known[one.name] for one in checks if one.name in known]
    print(table(results))
    (arguments.folder / "results.md").write_text(page(here, results))
    print(f"send back: {file}")
    fits = [check.name for check in checks if check.unfit(here, not arguments.no_engines) is None]
    wanted = [name for name in fits if name in arguments.only or not arguments.only]
    return 0 if all(name in known and known[name].status == "passed" for name in wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
