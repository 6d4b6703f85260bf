"""Training from Python, in a script or a notebook. `from torchtitan import train` resolves to this module.

    run = train("train_configs/debug_cpu.toml", {"training.steps": 50})
    print(run.metrics["eval/pass@1"])

The command line (grpo_train.py) runs the same job.

Python functions, classes and rows are written to files that workers and later runs can read. A function that can be
imported by name is used from there. For one that cannot (in a running script or a notebook cell), the source is written
to a module, together with the imports, functions, classes and constants that it uses. Nothing is pickled, and no other
code of the script runs again.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import inspect
import json
import logging
import os
import re
import signal
import symtable
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

from torchtitan.config.job_config import JobConfig
from torchtitan.config.run_folders import FROM_PYTHON
from torchtitan.config.values import read_toml
from torchtitan.errors import UserError
from torchtitan.grpo_train import Run, run_job
from torchtitan.preflight.hub import hub_model
from torchtitan.preflight.validate import Config, draft_of, ready
from torchtitan.utils.ranks import world_size

HEAD = "from __future__ import annotations\n"


def names_of(
    things: Iterable[str | Callable[..., Any]], folder: Path, what: str, kind: type = FunctionType
) -> list[str]:
    """Return the names for the configuration: strings are kept, functions and classes become module:name, written to
    `folder` if necessary. Error messages call them `what`.

    Raises:
        UserError: an object that cannot be imported, and whose source is not self-contained.
    """
    return [thing if isinstance(thing, str) else _name(thing, folder, what, kind) for thing in things]


def write_rows(rows: Iterable[Mapping[str, Any]], folder: Path) -> str:
    """Write rows to a .jsonl file in `folder` and return its path. Raises UserError for values JSON cannot hold."""
    lines = []
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise UserError(f"dataset, row {number}: must be a dict of columns, found {type(row).__name__}")
        try:
            lines.append(json.dumps(dict(row), ensure_ascii=False, allow_nan=False) + "\n")
        except (TypeError, ValueError) as error:
            raise UserError(f"dataset, row {number}: JSON cannot hold it: {error}") from error
    if not lines:
        raise UserError("dataset: there are no rows")
    return str(_write(folder, "rows", "".join(lines), ".jsonl"))


def _name(function: Callable[..., Any], folder: Path, what: str, kind: type) -> str:
    if (name := _importable(function)) is not None:
        return name
    if not isinstance(function, kind):
        made = "function (def)" if kind is FunctionType else "class"
        raise UserError(f"{what} {function!r}: must be a {made}, or importable from a module by its name")
    parts: dict[str, str] = {}
    _collect(function.__name__, function, f"{what} {function.__name__}", parts)
    path = _write(folder, "own", HEAD + "\n".join(parts.values()) + "\n", ".py")
    return f"{path.stem}:{function.__name__}"


def _importable(thing: Any) -> str | None:
    """`module:name` if importing the module gives this very object, without running the script again."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__name__", None)
    found = sys.modules.get(module or "")
    if found is None or module == "__main__" or getattr(found, "__spec__", None) is None:
        return None
    return f"{module}:{name}" if name and getattr(found, name, None) is thing else None


def _collect(name: str, value: Any, user: str, parts: dict[str, str]) -> None:
    """Add the definition of `name` to `parts`, after everything that it uses."""
    if name in parts:
        return
    if isinstance(value, ModuleType):
        parts[name] = f"import {value.__name__} as {name}"
    elif (importable := _importable(value)) is not None:
        module, _, original = importable.partition(":")
        parts[name] = f"from {module} import {original} as {name}"
    elif isinstance(value, (FunctionType, type)):
        parts[name] = ""  # it may refer to itself
        source = _source(name, value, user)
        namespace = value.__globals__ if isinstance(value, FunctionType) else vars(sys.modules[value.__module__])
        if (namesake := namespace.get(value.__name__, value)) is not value and namesake is not None:
            raise UserError(
                f"{user}: {name} was defined as {value.__name__}, which now names something else: rename one"
            )
        for used in _used_names(source, user):
            if used in namespace and used != name:
                _collect(used, namespace[used], user, parts)
                for module in _submodules(source, used, namespace[used]):
                    parts[module] = f"__import__({module!r})"
        del parts[name]
        parts[name] = source if value.__name__ == name else f"{source}\n{name} = {value.__name__}"
    elif isinstance(value, re.Pattern):
        parts[name] = f"import re\n{name} = re.compile({value.pattern!r}, {int(value.flags)})"
    elif _is_constant(value):
        parts[name] = f"{name} = {value!r}"
    else:
        raise UserError(
            f"{user}: uses {name}, a {type(value).__name__} that exists only in this process, but it runs in "
            "worker processes: create it inside the function, or put both into a module and import that"
        )


def _source(name: str, value: Any, user: str) -> str:
    advice = "write it as a plain function (def) at the top level of a script, a cell or a module"
    if isinstance(value, FunctionType):
        if value.__name__ == "<lambda>":
            raise UserError(f"{user}: a lambda has no name by which worker processes could find it; {advice}")
        if value.__code__.co_freevars:
            names = ", ".join(value.__code__.co_freevars)
            raise UserError(f"{user}: it is a closure over {names}, which worker processes do not have; {advice}")
    try:
        source = textwrap.dedent(inspect.getsource(value)).rstrip("\n")
    except (OSError, TypeError) as error:
        raise UserError(f"{user}: the source of {name} cannot be read ({error}); {advice}") from error
    # Since Python 3.13, the text of `python -c` passes for the source of what that text defines with exec().
    if not re.search(rf"^(async\s+)?(def|class)\s+{re.escape(value.__name__)}\b", source, re.MULTILINE):
        raise UserError(f"{user}: the source of {name} cannot be read (Python finds other text for it); {advice}")
    return source


def _used_names(source: str, user: str) -> list[str]:
    """Global names that a definition reads; with HEAD, annotations do not count. Raises UserError."""

    def read(table: symtable.SymbolTable) -> Iterator[str]:
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (symbol.is_global() or table.get_type() == "module"):
                yield symbol.get_name()
        for inner in table.get_children():
            yield from read(inner)

    try:
        return list(dict.fromkeys(read(symtable.symtable(HEAD + source, "source", "exec"))))
    except SyntaxError as error:
        raise UserError(f"{user}: its source cannot stand alone ({error.msg}); write it at the top level") from error


def _submodules(source: str, name: str, package: Any) -> Iterator[str]:
    """Yield the modules inside of a package that a definition reaches by attributes of `name`, such as
    xml.etree.ElementTree of xml: importing the package alone does not load them."""
    for node in ast.walk(ast.parse(source)):
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.insert(0, node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id == name and isinstance(package, ModuleType):
            paths = (".".join([package.__name__, *attributes[:end]]) for end in range(1, len(attributes) + 1))
            yield from (path for path in paths if path in sys.modules)


def _is_constant(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False


def _write(folder: Path, stem: str, text: str, suffix: str) -> Path:
    """Write a file named after its content, so that a later run in the same folder changes no existing file."""
    path = folder / f"{stem}_{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}{suffix}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Replace the file atomically, because another run's worker may be importing it.
        unfinished = path.with_suffix(f".{os.getpid()}.part")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
    return path


Rows = Iterable[Mapping[str, Any]]
Dataset = str | os.PathLike[str] | Rows | Callable[[], Rows]
Reward = str | Callable[..., Any]


@dataclass(frozen=True)
class Source:
    """One of the tasks of a run, a table [[source]] of its configuration; what is None it has from the run.

    The arguments of train() of the same name say what a dataset, rewards, an environment and tools can be.
    """

    name: str
    dataset: Dataset | None = None
    rewards: Reward | Iterable[Reward] | None = None
    environment: str | type | Mapping[str, Any] | None = None
    """Also keys of [environment], such as {"factory": Game, "max_turns": 6}"""
    tools: Reward | Iterable[Reward] | None = None
    group_filter: str | Callable[..., Any] | None = None
    weight: float | None = None
    epochs: float | None = None
    required: bool = True
    values: Mapping[str, Any] | None = None
    """Any further keys of the table (docs/sources.md)"""

    def table(self, folder: Path) -> dict[str, Any]:
        """Return the table; what Python made is written to `folder`. Raises UserError as names_of does."""
        environment = self.environment
        keys = dict(environment) if isinstance(environment, Mapping) else {}
        if environment is not None and not isinstance(environment, Mapping):
            keys["factory"] = environment
        if self.tools is not None:
            keys["tools"] = self.tools
        if "factory" in keys:
            (keys["factory"],) = names_of([keys["factory"]], folder, "environment", type)
        if "tools" in keys:
            keys["tools"] = names_of(_several(keys["tools"], "tools"), folder, "tool")
        table: dict[str, Any] = {"name": self.name, "required": self.required}
        if self.dataset is not None:
            table["rollout.dataset"] = _dataset_name(self.dataset, folder)
        if self.rewards is not None:
            table["rewards.functions"] = names_of(_several(self.rewards, "rewards"), folder, "reward function")
        if keys:
            table["environment"] = keys
        if self.group_filter is not None:
            table["grpo.group_filter"] = self.group_filter and names_of([self.group_filter], folder, "group_filter")[0]
        if self.weight is not None:
            table["weight"] = self.weight
        if self.epochs is not None:
            table["epochs"] = self.epochs
        return table | dict(self.values or {})


def _several(given: Any, argument: str) -> Iterable[Any]:
    """Return functions or names one by one, also where there is only one. Raises UserError for anything else."""
    if isinstance(given, str) or callable(given):
        return [given]
    if not isinstance(given, Iterable):
        raise UserError(f"{argument}: must be a name, a function, or a list of these, found {type(given).__name__}")
    return given


def _tasks(sources: Any) -> list[Source]:
    """Return the sources, also where there is only one. Raises UserError for anything else."""
    tasks = list(sources) if isinstance(sources, Iterable) else [sources]
    for task in tasks:
        if not isinstance(task, Source):
            raise UserError(f"sources: must be a list of Source, found {type(task).__name__}")
    return tasks


def _dataset_name(dataset: Dataset, folder: Path) -> str:
    rows: Any = dataset() if callable(dataset) else dataset
    if isinstance(rows, (str, os.PathLike)):
        return os.fspath(rows)
    if not isinstance(rows, Iterable):
        raise UserError(f"dataset: must be a name, rows, or a function that returns them, found {type(rows).__name__}")
    return write_rows(rows, folder)


def train(
    config: Config = MappingProxyType({}),
    overrides: Mapping[str, Any] | None = None,
    *,
    model: str | os.PathLike[str] | None = None,
    rewards: Reward | Iterable[Reward] | None = None,
    dataset: Dataset | None = None,
    environment: str | type | None = None,
    tools: Reward | Iterable[Reward] | None = None,
    loss: str | Callable[..., Any] | None = None,
    advantage: str | Callable[..., Any] | None = None,
    correction: str | Callable[..., Any] | None = None,
    group_filter: str | Callable[..., Any] | None = None,
    sampler: str | Callable[..., Any] | None = None,
    sources: Source | Iterable[Source] | None = None,
    **tables: Mapping[str, Any],
) -> Run:
    """Run a job in this process, as one rank, until its last step or a stop signal. Call it in the main thread.

    SIGINT, SIGTERM and SIGHUP save and end the run; a second one ends the process. The previous handlers are then
    restored, and KeyboardInterrupt (after the others SystemExit) is raised, whose attribute `run` is the Run: a loop of
    runs ends, too.

    Args:
        config: a TOML file (or the name of a shipped one, such as "debug_cpu"), a dict of its tables or of
            values by `table.key`, or a JobConfig; a checkpoint directory here is the model, with the defaults.
        overrides: values by `table.key`, such as {"training.steps": 3}, and tables, such as {"training": {"steps": 3}}.
        model: for model.hf_assets_path: a Hugging Face checkpoint directory, or the folder of a run.
        rewards: for rewards.functions: names, or functions in TRL's call convention, run by worker processes.
        dataset: for rollout.dataset: its name or path, rows (dicts of columns), or a function that returns them.
        environment: for environment.factory: its name, or the class, which worker processes instantiate.
        tools: for environment.tools: names or functions, or one of them, run by worker processes.
        loss, advantage, correction, group_filter: for grpo.loss_type, .advantage, .off_policy_correction and
            .group_filter: a name, or a function, run by this process (docs/adding_an_objective.md).
        sampler: for rollout.sampler: a name, or a function (docs/sources.md).
        sources: for [[source]], the tasks of a run of several (docs/sources.md); the other arguments hold for all.
        tables: further overrides, each a table as in `config`, such as
            weight_sync={"transport": "disk", "disk": {"delta": True}}. [model], [rewards] and [environment] are not
            given so, but in `overrides`.

    Raises:
        UserError: a mistake in the configuration (ConfigError, which lists all of them), or what stopped the run early.
        KeyboardInterrupt, SystemExit: a signal stopped the run.
    """
    if world_size() > 1:
        raise UserError("train() runs one rank; start several with: torchrun -m torchtitan.grpo_train (run_grpo.sh)")
    if threading.current_thread() is not threading.main_thread():
        raise UserError("train() must be called in the main thread: only that thread gets stop signals")
    if model is not None and not isinstance(model, (str, os.PathLike)):
        raise UserError(
            f"model: a {type(model).__name__} in memory cannot be trained, because engines and checkpoints read files: "
            "save it and its tokenizer with save_pretrained(FOLDER), and give the folder"
        )
    _refuse_wrong_kinds(config, overrides)
    if isinstance(config, str) and not config.endswith(".toml") and read_toml(config)[1] and hub_model(config):
        raise UserError(f"config: there is no file {config}; for a model of the Hub: model={config!r}")
    is_model = isinstance(config, (str, os.PathLike)) and Path(config, "config.json").is_file()
    draft = draft_of({} if is_model else config, {**(overrides or {}), **tables})
    if model is not None or is_model:
        draft.set("model.hf_assets_path", str(config if model is None else model), "model")
    folder = Path(draft.value("job.dump_folder")).resolve() / FROM_PYTHON
    if rewards is not None:
        draft.set("rewards.functions", names_of(_several(rewards, "rewards"), folder, "reward function"), "rewards")
    if environment is not None:
        (name,) = names_of([environment], folder, "environment", type)
        draft.set("environment.factory", name, "environment")
    if tools is not None:
        draft.set("environment.tools", names_of(_several(tools, "tools"), folder, "tool"), "tools")
    functions = {
        "grpo.loss_type": loss,
        "grpo.advantage": advantage,
        "grpo.off_policy_correction": correction,
        "grpo.group_filter": group_filter,
        "rollout.sampler": sampler,
    }
    for key, function in functions.items():
        if function is not None:
            called = key.partition(".")[2]
            (name,) = names_of([function], folder, called)
            draft.set(key, name, called)
    if dataset is not None:
        draft.set("rollout.dataset", _dataset_name(dataset, folder), "dataset")
    if sources is not None:
        draft.set_sources([source.table(folder) for source in _tasks(sources)], "sources")
    with _as_found():
        run = run_job(ready(draft))
    if run.exit_code:
        interrupted = run.exit_code == 128 + signal.SIGINT
        reason = f"stopped after {run.version} steps; run folder {run.folder}"
        stopped = KeyboardInterrupt(reason) if interrupted else SystemExit(run.exit_code)
        stopped.run = run  # type: ignore[union-attr]
        raise stopped
    return run


def _refuse_wrong_kinds(config: Any, overrides: Any) -> None:
    """Raise UserError for an argument of train() that is of none of its types."""
    for name, value, kinds, meaning in (
        ("config", config, (str, os.PathLike, Mapping, JobConfig), "a TOML file, a dict of tables or a JobConfig"),
        ("overrides", overrides, (Mapping,), 'a dict, such as {"training.steps": 3}'),
    ):
        if value is not None and not isinstance(value, kinds):
            raise UserError(f"{name}: must be {meaning}, found {type(value).__name__}")


@contextlib.contextmanager
def _as_found() -> Iterator[None]:
    """Restore the environment, the log handlers and the import path afterwards."""
    environment, path, logger = dict(os.environ), list(sys.path), logging.getLogger()
    handlers, level = logger.handlers, logger.level
    logger.handlers = []
    importlib.invalidate_caches()  # modules have just been written
    try:
        yield
    finally:
        for handler in logger.handlers:
            handler.close()
        logger.handlers, sys.path[:] = handlers, path
        logger.setLevel(level)
        os.environ.clear()
        os.environ.update(environment)
