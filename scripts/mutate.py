"""Mutation testing: break one thing in a module, and see whether the tests notice. No file is changed.

    python scripts/mutate.py --sample 200 torchtitan/weight_sync/*/*.py -- tests/unit_tests/weight_sync

First all tests run once, unbroken: they have to pass, and it is noted which functions each of them enters. Each mutant
is a process of its own that gets the broken module where it imports it, as do all processes that it starts, and runs
pytest -x over the tests that enter the broken function, the quickest first, then over those that start processes.
Mutants are drawn evenly from the modules, by --seed; what only people read (log lines, texts of errors, annotations) is
left alone. The last line is the share that died; survivors are printed with their line.

With --state FILE, the outcome of each mutant is written down at once, and the same command goes on where it was
stopped. The file belongs to one draw from unchanged modules; tests may change meanwhile, for the mutants that remain.
With --among FILE, only those of a draw are tried that have survived by such a file: first all of them with the tests
that are quick, then the survivors with those that take long.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult}
# For what a broken module never does.
PATIENCE_S = 20.0
# A mutant may grow for ever.
MOST_MEMORY = 16 << 30


@dataclass
class Mutant:
    """One change: `apply` makes it in the tree."""

    path: Path
    tree: ast.Module
    line: int
    what: str
    apply: Callable[[], None]


def mutants_of(path: Path) -> list[Mutant]:
    """All that can be made of a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [Mutant(path, tree, line, what, apply) for line, what, apply in _changes(tree, inside=False)]


def _changes(node: ast.AST, inside: bool) -> Iterator[tuple[int, str, Callable[[], None]]]:
    if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr)) or _is_for_people(node):
        return
    inside = inside or isinstance(node, (ast.FunctionDef, ast.Lambda))
    if inside:
        yield from _own_changes(node)
    for name, value in ast.iter_fields(node):
        # zip's strict asserts something.
        if name in ("annotation", "returns", "decorator_list", "bases") or getattr(node, "arg", "") == "strict":
            continue
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, ast.AST):
                yield from _changes(child, inside)


def _is_for_people(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return all(map(_is_for_people, [*node.body, *node.orelse]))
    if not isinstance(node, ast.Expr):
        return False
    value = node.value
    return isinstance(value, ast.Constant) or "logger." in ast.unparse(value)


def _own_changes(node: ast.AST) -> Iterator[tuple[int, str, Callable[[], None]]]:
    def change(what: str, owner: Any, name: str, new: Any) -> tuple[int, str, Callable[[], None]]:
        text = ast.unparse(node).partition("\n")[0]
        return getattr(node, "lineno", 0), f"{text}  ->  {what}", lambda: setattr(owner, name, new)

    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        new = COMPARISONS[type(node.ops[0])]
        yield change(new.__name__, node, "ops", [new(), *node.ops[1:]])
    elif isinstance(node, ast.BoolOp):
        operator = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield change(type(operator).__name__, node, "op", operator)
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in ARITHMETIC:
        operator = ARITHMETIC[type(node.op)]
        yield change(operator.__name__, node, "op", operator())
    elif isinstance(node, ast.Constant) and type(node.value) in (bool, int):
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield change(str(value), node, "value", value)
    elif isinstance(node, (ast.If, ast.IfExp)):
        yield change("always", node, "test", ast.copy_location(ast.Constant(True), node.test))
        yield change("never", node, "test", ast.copy_location(ast.Constant(False), node.test))
    body = getattr(node, "body", None)
    for name in ("body", "orelse") if isinstance(body, list) else ():
        statements = getattr(node, name, [])
        for index, statement in enumerate(statements):
            removable = isinstance(statement, (ast.Assign, ast.AugAssign, ast.Delete, ast.Continue, ast.Return))
            if (removable or isinstance(statement, ast.Expr)) and not _is_for_people(statement):
                nothing = ast.copy_location(ast.Pass(), statement)
                new_body = [*statements[:index], nothing, *statements[index + 1 :]]
                text = ast.unparse(statement).partition("\n")[0]
                yield statement.lineno, f"without  {text}", lambda n=name, b=new_body: setattr(node, n, b)  # type: ignore[misc]


# What every Python process imports at its start, where it lies in a folder of PYTHONPATH: gives out the mutant.
SITE = """
import importlib.machinery, sys

class Loader:
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == {name!r} else None

    def create_module(self, spec):
        return None

    def get_code(self, name):  # python -m asks for it
        return compile({source!r}, {path!r}, "exec")

    def exec_module(self, module):
        module.__file__ = {path!r}
        exec(self.get_code(module.__name__), vars(module))

sys.meta_path.insert(0, Loader())
"""


def give_out(mutant: Mutant, folder: str) -> None:
    """Have this process import the mutant, and all that it starts from now on."""
    mutant.apply()
    path, name = str(mutant.path.resolve()), ".".join(mutant.path.with_suffix("").parts)
    os.environ["TORCHTITAN_TEST_PATIENCE_S"] = str(PATIENCE_S)
    text = SITE.format(name=name, path=path, source=ast.unparse(ast.fix_missing_locations(mutant.tree)))
    (Path(folder) / "sitecustomize.py").write_text(text)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    exec(text, {})


class Entered:
    """A plugin of pytest: which functions each test enters, on all of its threads, whether it starts processes, and how
    many seconds it takes."""

    def __init__(self) -> None:
        self.tests: dict[str, tuple[float, list[CodeType]]] = {}

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> None:
        """Before each test; what is still entered of the one before by then counts for that one."""
        codes: dict[int, CodeType] = {}
        self.end_test()
        self._began, self._name, self._codes = time.monotonic(), item.nodeid, codes

        def note(frame: FrameType, _event: str, _argument: Any) -> None:
            codes[id(frame.f_code)] = frame.f_code

        threading.settrace(note)
        sys.settrace(note)

    def end_test(self) -> None:
        """The last test is over."""
        sys.settrace(None)
        if hasattr(self, "_name"):
            self.tests[self._name] = time.monotonic() - self._began, list(self._codes.values())

    def of(self, paths: set[Path]) -> dict[str, tuple[float, bool, list[tuple[str, int, int]]]]:
        """Test -> (seconds, whether it starts processes, the functions of these modules that it enters: path, first and
        last line)."""
        modules = {str(path.resolve()): str(path) for path in paths}

        def lines(code: CodeType) -> tuple[str, int, int]:
            last = max(line or 0 for _, _, line in code.co_lines())
            return modules[code.co_filename], code.co_firstlineno, last

        found = {}
        for name, (seconds, codes) in self.tests.items():
            own = [lines(code) for code in codes if code.co_filename in modules and code.co_name[0] != "<"]
            found[name] = seconds, any(code.co_name == "_execute_child" for code in codes), own
        return found


def forget(names: set[str]) -> None:
    """Have this process import these modules anew."""
    for name in names:
        package, _, child = name.rpartition(".")
        if package:  # one that stays still has its child, and gives it to who imports it from there
            vars(sys.modules[package]).pop(child, None)
    for name in names:
        del sys.modules[name]


def users(package: str) -> set[str]:
    """What of the checkout is imported and is of this package, or imports something of it, itself or through others.
    All else stays: not every module can be imported twice, say one that registers operators with torch."""
    own = {name: _imports(module) for name, module in sys.modules.items() if _is_own(module)}
    found = {name for name in own if name == package or name.startswith(f"{package}.")}
    while more := {name for name in own.keys() - found if own[name] & found}:
        found |= more
    return found


def _imports(module: ModuleType) -> set[str]:
    """Names of modules in its source, and some that are of other things."""
    found = set()
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def run_unbroken(paths: set[Path], tests: list[str], again: set[str]) -> dict[str, Any] | None:
    """What Entered.of gives, from a process that runs all tests as `survives` does, but whole; None where they do not
    pass."""
    with tempfile.NamedTemporaryFile() as file:
        child = os.fork()
        if child == 0:
            import pytest

            forget(again)
            entered = Entered()
            code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests], plugins=[entered])
            entered.end_test()
            Path(file.name).write_text(json.dumps(entered.of(paths)))
            os._exit(int(code))
        _, status = os.waitpid(child, 0)
        found: dict[str, Any] = json.loads(Path(file.name).read_text() or "{}")
    return None if status else found


def survives(mutant: Mutant, tests: list[str], again: set[str], seconds: float, folder: str) -> bool:
    """Whether pytest passes in a process that imports the mutant, and `again` what uses it; one that hangs is dead."""
    child = os.fork()
    if child == 0:
        import pytest

        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        forget(again)
        give_out(mutant, folder)
        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])) & 0xFF)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def end_what_was_started(folder: str) -> None:
    """Of processes with this folder in their path: broken ones may outlive their parent."""
    import psutil

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and folder in process.environ().get("PYTHONPATH", ""):
                process.kill()


class State:
    """What a run has found so far, in a file where it has one."""

    def __init__(self, path: Path | None, sources: list[str], named: list[str], tests: list[str] | None):
        """sources: of the modules; named: the mutants; tests: None for those of the file. Raises ValueError if the file
        is of others."""
        self._path = path
        draw = hashlib.sha256(repr((sources, named)).encode()).hexdigest()
        self.found: dict[str, Any] = {"draw": draw, "tests": tests, "entered": None, "outcomes": []}
        if path is not None and path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["draw"] != draw or tests not in (None, found["tests"]):
                raise ValueError(f"{path} is of other modules, mutants or tests: name another file, or delete it")
            self.found = found

    def write(self) -> None:
        """Replace the file, so that a run that is killed meanwhile leaves the one before."""
        if self._path is not None:
            temporary = self._path.with_name(f"{self._path.name}.tmp")
            temporary.write_text(json.dumps(self.found), encoding="utf-8")
            temporary.replace(self._path)


def _is_own(module: ModuleType) -> bool:
    path = Path(getattr(module, "__file__", None) or "/").resolve()
    is_here = Path.cwd() in path.parents and "site-packages" not in path.parts and path.is_file()
    return is_here and module.__name__ != "__main__"


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("modules", nargs="+", type=Path)
    parser.add_argument("--sample", type=int, default=150, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, help="a file to go on from")
    parser.add_argument("--among", type=Path, help="such a file: only what has survived there")
    parser.add_argument("--only", default="", help="only mutants whose description holds this")
    separator = sys.argv.index("--")
    options, tests = parser.parse_args(sys.argv[1:separator]), sys.argv[separator + 1 :]
    rng = random.Random(options.seed)
    drawn: list[Mutant] = []
    for number, path in enumerate(options.modules):
        share = (options.sample * (number + 1)) // len(options.modules) - (options.sample * number) // len(
            options.modules
        )
        found = [one for one in mutants_of(path) if options.only in f"{one.path}:{one.line} {one.what}"]
        drawn += rng.sample(found, min(share, len(found)))
    # A run that is stopped has then drawn evenly, too.
    rng.shuffle(drawn)
    named = [f"{mutant.path}:{mutant.line}  {mutant.what}" for mutant in drawn]
    sources = [path.read_text(encoding="utf-8") for path in options.modules]
    try:
        if options.among is not None:
            outcomes = State(options.among, sources, named, None).found["outcomes"]
            kept = [number for number, survived in enumerate(outcomes) if survived]
            drawn, named = [drawn[number] for number in kept], [named[number] for number in kept]
        state = State(options.state, sources, named, tests)
    except ValueError as error:
        print(error)
        return 2
    import pytest

    # This checkout's modules, wherever else they are installed.
    sys.path.insert(0, os.getcwd())
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
    for path in options.modules:
        importlib.import_module(".".join(path.with_suffix("").parts))
    # So that every process has what is outside of the product imported from the start.
    if pytest.main(["--collect-only", "-q", "--no-summary", "-p", "no:cacheprovider", *tests]):
        return 2
    again = users(".".join(options.modules[0].parts[:-1]))
    entered = state.found["entered"] = state.found["entered"] or run_unbroken(
        {mutant.path for mutant in drawn}, tests, again
    )
    if entered is None:
        print("the tests do not pass as they are")
        return 2
    state.write()

    outcomes = state.found["outcomes"]
    for number in range(len(outcomes), len(drawn)):
        mutant, began, chosen = drawn[number], time.monotonic(), dict[str, tuple[bool, float]]()
        for name, (seconds, starts, functions) in entered.items():
            enters = any(path == str(mutant.path) and first <= mutant.line <= last for path, first, last in functions)
            if enters or starts:
                chosen[name] = not enters, seconds
        nodes = sorted(chosen, key=lambda name: chosen[name])
        # The tests may take that much longer than they did unbroken, before a mutant counts as one that hangs.
        most = 30 + 4 * sum(seconds for _, seconds in chosen.values())
        with tempfile.TemporaryDirectory() as folder:
            survived = not nodes or survives(mutant, nodes, again, most, folder)
            end_what_was_started(folder)
        outcomes.append(survived)
        state.write()
        what = "SURVIVED" if survived else "dead"
        seconds = time.monotonic() - began
        print(f"{number + 1}/{len(drawn)} {what} {seconds:.1f} s, {len(nodes)} tests  {named[number]}", flush=True)
    for survived, name in zip(outcomes, named, strict=True):
        if survived:
            print(f"SURVIVED {name}")
    alive = sum(outcomes)
    print(f"{len(drawn) - alive} of {len(drawn)} dead: {1 - alive / max(len(drawn), 1):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
