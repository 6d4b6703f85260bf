"""Values from a file, the command line (`--table.key value…`, `--dry-run`, `--help`) or Python become one JobConfig;
every mistake in them becomes a Problem."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from torchtitan.config.evaluations import EVAL_KEYS, SET_KEYS, EvalSet
from torchtitan.config.gpu_defaults import device_defaults
from torchtitan.config.job_config import JobConfig, free_table, known_keys, table_types, value_at
from torchtitan.config.kinds import chooser_of
from torchtitan.config.other_names import name_here
from torchtitan.config.reference import help_text
from torchtitan.config.sources import SOURCE_KEYS, Source, fields_of, flat, is_among
from torchtitan.config.values import (
    OPTIONS,
    RULE,
    Hyphenated,
    option_name,
    read_toml,
    show,
    spelled,
    value_of_words,
    without_none,
)
from torchtitan.errors import ConfigError, nearest
from torchtitan.utils.logs import print_page

# What editors and web pages make of two hyphens is among these.
DASHES = "-–—"
PLACE, OVERRIDES = "command line", "overrides"
SOURCES, SETS = "source", "eval.set"
Inner = TypeVar("Inner", Source, EvalSet)
PROGRAMS = {"__main__.py": "run_grpo.sh", "grpo_train.py": "torchrun -m torchtitan.grpo_train"}
"""What people have typed where Python was called with this file"""


@dataclass(frozen=True)
class Problem:
    """One mistake: the key it is about (`table.key`, or empty) and the message."""

    key: str
    text: str

    def follows_from(self, keys: Iterable[str]) -> bool:
        """Whether it is about one of these keys or compares with it: where their values are wrong, it says nothing."""
        return self.key in keys or any(re.search(rf"\b{re.escape(key)}\b", self.text) for key in keys if key)


@dataclass
class Draft:
    """What will be a JobConfig: the values that were given, later ones in place of earlier ones."""

    problems: list[Problem] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    """`table.key` -> value"""
    sources: list[Any] = field(default_factory=list)
    """The tables of [[source]]"""
    is_complete: bool = True
    """Whether all files could be read, so that combinations of values can be judged"""
    written: dict[str, tuple[str, str]] = field(default_factory=dict)
    """`table.key` -> where its value comes from, and how it was written there"""
    chosen: str = ""
    """What this machine and the model have decided where a value is "auto", and why"""

    shows_defaults: bool = False
    """Whether --dry-run prints keys that were not set, too"""

    def refuse(self, key: str, text: str) -> None:
        """Note a mistake."""
        self.problems.append(Problem(key, text))

    def add_file(self, file: str) -> None:
        """Take the values of a TOML file."""
        tables, problem = read_toml(file)
        self.add(tables, file)
        self.set("job.config_file", file, file)
        if problem:
            self.is_complete = False
            self.refuse("job.config_file", f"job.config_file = {show(file)} {problem}")

    def add(self, tables: Mapping[str, Any], place: str) -> None:
        """Take the values of a document with TOML tables, or with `table.key` as one name."""
        for table, content in ((str(name), content) for name, content in tables.items()):
            is_table = isinstance(content, Mapping)
            if "." in table:
                self.set(table, content, place)
            elif table == SOURCES:
                self.set_sources(content, place)
            elif table not in table_types():
                advice = "".join(name_here(f"{table}.{key}") for key in content) if is_table else ""
                unknown = f"unknown table [{table}]{advice or nearest(table, table_types())}"
                outside = f"{table} = {show(content)} stands outside a table{nearest_key(table)}"
                self.refuse(table, f"{place}: {unknown if is_table else outside}")
            elif not is_table:
                self.refuse(table, f"{place}: {table} = {show(content)} must be a table: [{table}]")
            else:
                self._add_table(table, content, place)

    def _add_table(self, table: str, content: Mapping[str, Any], place: str) -> None:
        for key, value in content.items():
            name = f"{table}.{key}"
            if name in table_types() and isinstance(value, Mapping):
                self._add_table(name, value, place)
            else:
                self.set(name, value, place)

    def set(self, name: str, value: Any, place: str, written: str | None = None) -> None:
        """Take the value of `table.key`; `written`: how it stands there, where that is not TOML."""
        key = str(name)
        # TOML has neither; Python's callers have both.
        if isinstance(value, tuple):
            value = list(value)
        elif isinstance(value, Path):
            value = os.fspath(value)
        if table := free_table(key):
            self._set_option(table, key.removeprefix(f"{table}."), value, place)
        elif key in table_types() and isinstance(value, Mapping):
            self._add_table(key, value, place)
        elif key not in known_keys():
            self.refuse(key, f"{place}: unknown key {key} = {show(value)}{nearest_key(key)}")
        else:
            self.values[key] = value
            self.written[key] = (place, show(value) if written is None else written)

    def set_sources(self, sources: Any, place: str) -> None:
        """Take the tables of [[source]], in place of earlier ones."""
        if isinstance(sources, list) and all(isinstance(source, Mapping) for source in sources):
            self.sources, self.written[SOURCES] = [dict(source) for source in sources], (place, "")
        else:
            self.refuse(SOURCES, f"{place}: source must be an array of tables: [[source]]")

    def _set_option(self, table: str, option: str, value: Any, place: str) -> None:
        """One entry of a free table, besides those that there are. An engine's max_model_len and max-model-len are the
        same."""
        options = self.values.setdefault(table, {})
        if isinstance(options, dict):  # else it is refused as a whole
            if any(isinstance(rule, Hyphenated) for rule in known_keys()[table].metadata):
                option = option_name(option)
                option = next((name for name in options if option_name(name) == option), option)
            self.values[table] = options | {option: value}
            self.written[table] = (place, show({option: value}))

    def build(self) -> tuple[JobConfig, list[Problem]]:
        """The configuration, with defaults (this machine's device_defaults, too) for what is missing or wrong, and all
        problems so far."""
        problems = list(self.problems)
        contents: dict[str, dict[str, Any]] = {table: {} for table in table_types()}
        for name, value in (self.values | device_defaults(self.values)).items():
            table, _, key = name.rpartition(".")
            contents[table][key] = value
        tables: dict[str, Any] = {}
        # A table's own tables come after it, and are part of its values.
        for table in reversed(table_types()):
            content, wrong_values = self._build_table(table, contents[table])
            problems += wrong_values
            above, _, name = table.rpartition(".")
            (contents[above] if above else tables)[name] = content
        config = JobConfig(**tables)
        problems += self._without_effect(config)
        for called, given in _named("[[source]]", self.sources):
            config.source += self._build_inner(Source, SOURCES, called, given, problems)
        sets, config.eval.set = config.eval.set, []
        for called, given in _named("[[eval.set]]", sets):
            given = {f"eval.{key}" if key in EVAL_KEYS else key: value for key, value in given.items()}
            built = self._build_inner(EvalSet, SETS, called, given, problems)
            config.eval.set += [eval_set.given() for eval_set in built]
        return config, problems

    def value(self, name: str) -> Any:
        """The value of `table.key`, or its default if it is missing or wrong, before anything else is known."""
        table, _, key = name.rpartition(".")
        given = {key: self.values[name]} if name in self.values else {}
        content, _ = self._build_table(table, given)
        return getattr(content, key)

    def _build_table(self, table: str, values: dict[str, Any]) -> tuple[Any, list[Problem]]:
        """A table with these values of its keys, without the wrong ones, and what is wrong with those."""
        kind = table_types()[table]
        try:
            return kind(**values), []
        except ValidationError as error:
            wrong = {str(mistake["loc"][0]): mistake for mistake in error.errors()}
        problems = [self._wrong_value(f"{table}.{key}", mistake) for key, mistake in wrong.items()]
        return kind(**{key: value for key, value in values.items() if key not in wrong}), problems

    def _without_effect(self, config: JobConfig) -> Iterator[Problem]:
        """Options of a kind that is not chosen. A file may have them, for the day on which it is; who types one now
        means it now."""
        for name, (place, written) in self.written.items():
            chosen_by, kind = chooser_of(name.rpartition(".")[0])
            if chosen_by and place in (PLACE, OVERRIDES) and value_at(config, chosen_by) != kind:
                text = f"{place}: {name} = {written} has no effect: {chosen_by} is {show(value_at(config, chosen_by))}"
                yield Problem(name, text)

    def _build_inner(
        self, kind: type[Inner], table_key: str, called: str, given: dict[str, Any], problems: list[Problem]
    ) -> list[Inner]:
        """What one table of [[source]] or [[eval.set]] says, or nothing and its problems."""
        place = f"{self.written[table_key][0]}: {called}"
        allowed: tuple[str, ...] = SOURCE_KEYS if kind is Source else SET_KEYS
        found: list[Problem] = []
        fields: dict[str, Any] = {}
        parts = Draft()
        for key, value in flat(given, table_types()):
            short = key.removeprefix("eval.") if kind is EvalSet else key
            if key in fields_of(kind):
                fields[key] = value
            elif is_among(key, allowed):
                parts.set(key, value, place)
            elif key in known_keys():
                text = f"{place}: {short} = {show(value)} is not allowed: it stands in its table, for all of them"
                found.append(Problem(key, text))
            else:
                others: list[str] = [name.removeprefix("eval.") for name in known_keys() if is_among(name, allowed)]
                hint = name_here(key) or nearest(short, [*fields_of(kind), *others])
                found.append(Problem(key, f"{place}: unknown key {short} = {show(value)}{hint}"))
        config, wrong_values = parts.build()
        found += wrong_values
        values = {key: value_at(config, key) for key in parts.values}
        try:
            built = kind(**fields, values=values)
        except ValidationError as error:
            for mistake in error.errors():
                key = str(mistake["loc"][0])
                if key not in fields:
                    found.append(Problem(key, f"{place}: {key} is missing"))
                    continue
                type_text = f"{key} takes {describe_type(fields_of(kind)[key].annotation)}"
                why = mistake["msg"] if mistake["type"] == RULE else type_text
                found.append(Problem(key, f"{place}: {key} = {show(fields[key])} is not allowed: {why}"))
        problems += [Problem(f"{table_key}.{problem.key}", problem.text) for problem in found]
        return [] if found else [built]

    def _wrong_value(self, name: str, error: ErrorDetails) -> Problem:
        place, written = self.written[name]
        if error["type"] == RULE:
            return Problem(name, f"{place}: {name} = {show(self.values[name])} is not allowed: {error['msg']}")
        kind = known_keys()[name].annotation
        choices = [choice for choice in get_args(kind) if isinstance(choice, str)]
        text = f"{place}: {name} = {written} is not allowed: {name} takes {describe_type(kind)}"
        return Problem(name, text + nearest(written.strip('"'), choices))


def _named(title: str, tables: Iterable[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What messages call each of these tables, and the table."""
    for number, given in enumerate(tables, start=1):
        yield f"{title} {show(given['name']) if given.get('name') else f'number {number}'}", given


def nearest_key(name: str) -> str:
    """Like `nearest` for a whole key `table.key`: the key that others call so, else a like key of its table, else the
    same key in another table. A name without a table may be a key of any."""
    if here := name_here(name):
        return here
    table, _, key = name.rpartition(".")
    # Without a table, the key may be of any; the first one counts.
    prefix = f"{table}." if table else ""
    inside = {known.rpartition(".")[2]: known for known in reversed(known_keys()) if known.startswith(prefix)}
    close = difflib.get_close_matches(key, list(inside), n=1, cutoff=0.75)
    if close:
        return f" (nearest: {inside[close[0]]})"
    elsewhere = [known for known in known_keys() if known.rpartition(".")[2] == key]
    if elsewhere:
        return nearest(name, elsewhere) or f" (nearest: {elsewhere[0]})"
    return nearest(name, known_keys())


def describe_type(kind: Any) -> str:
    """What values a key of this type takes, in words."""
    kind = without_none(kind)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(spelled, get_args(kind)))
    if get_origin(kind) is list:
        return f"a list, each element {describe_type(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return OPTIONS
    return {bool: "true or false", int: "an integer", float: "a number", str: "a string"}[kind]


def read_command_line(argv: Sequence[str]) -> tuple[Draft, bool]:
    """The draft of what the words say, on top of the last --job.config_file, and whether --dry-run is among them.

    Understands `--table.key value…`, `--table.key=value`, `--table.flag`, `--table.no-flag` and `--dry-run all`.
    --help prints the keys of all tables that apply, or of those that stand behind it, and exits: with code 2 if there
    is no such table.
    """
    _help_if_asked(argv)

    def is_second_file(option: str, words: list[str]) -> bool:
        return option.replace("-", "_") == "job.config_file" and bool(words)

    draft = Draft()
    options: list[tuple[str, list[str]]] = []
    for token in argv:
        if token.startswith("--"):
            name, equals, value = token[2:].partition("=")
            options.append((name, [value] if equals else []))
        elif (key := token.lstrip(DASHES).partition("=")[0].replace("-", "_")) in (*known_keys(), "dry_run"):
            text = f"{token!r} must begin with two hyphens: --{token.lstrip(DASHES)}"
            draft.refuse(key, f"{PLACE}: {text}")
            options.append((key, [token.partition("=")[2]] if "=" in token else []))
        elif token.endswith(".toml") and (not options or is_second_file(*options[-1])):
            text = f"{token!r} stands without a key: --job.config_file {token}, or CONFIG_FILE={token} ./run_grpo.sh"
            draft.refuse("job.config_file", f"{PLACE}: {text}")
        elif options:
            options[-1][1].append(token)
        else:
            draft.refuse("", f"{PLACE}: {token!r} does not belong to any --table.key")
    settings: list[tuple[str, list[str]]] = []
    for name, words in options:
        setting = _setting(draft, name, words)
        if setting is not None:
            settings.append(setting)
    files = [words[0] for key, words in settings if key == "job.config_file" and len(words) == 1]
    if files and files[-1]:
        draft.add_file(files[-1])
    for key, words in settings:
        draft.set(key, _value(key, words), PLACE, " ".join(words) or "(no value)")
    dry_runs = [words for name, words in options if name.replace("-", "_") == "dry_run"]
    draft.shows_defaults = ["all"] in dry_runs
    return draft, bool(dry_runs)


def _help_if_asked(argv: Sequence[str]) -> None:
    """Print help and exit if --help, `--help TABLE` or `--help=TABLE` is among the words."""
    asked = [number for number, word in enumerate(argv) if word.partition("=")[0] in ("-h", "--help")]
    if not asked:
        return
    begin = asked[0]
    end = next((i for i in range(begin + 1, len(argv)) if argv[i].startswith("-")), len(argv))
    first = argv[begin].partition("=")[2]
    names = [*([first] if first else []), *argv[begin + 1 : end]]
    rest = [word for word in (*argv[:begin], *argv[end:]) if word not in ("-h", "--help")]
    program = Path(sys.argv[0]).name
    try:
        page = help_text(PROGRAMS.get(program, program), read_command_line(rest)[0].values, names)
    except ValueError as error:
        print(f"error: --help: {error}", file=sys.stderr)
        raise SystemExit(ConfigError.exit_code) from None
    print_page(page)
    raise SystemExit(0)


def _setting(draft: Draft, option: str, words: list[str]) -> tuple[str, list[str]] | None:
    """(`table.key`, its words) for an option, or None where it is a mistake or sets no value."""
    name = option.replace("-", "_")
    table, _, key = name.rpartition(".")
    positive = f"{table}.{key.removeprefix('no_')}"
    if free := free_table(name):
        return free + option[len(free) :], words
    takes_options = free_table(f"{name}.") == name
    if not takes_options and name in known_keys():
        return name, words
    switches_off = positive != name and positive in known_keys() and _is_switch(_kind(positive))
    if name == "dry_run" or switches_off:
        allowed = "no value, or all" if name == "dry_run" else "no value"
        if words and not (name == "dry_run" and words == ["all"]):
            draft.refuse(name, f"{PLACE}: {words[0]!r} does not belong to any --table.key: --{option} takes {allowed}")
        return (positive, ["false"]) if switches_off else None
    if takes_options:
        text = f"needs the name of an option, such as --{name}.NAME VALUE"
    else:
        known = "" if table else nearest(name, ["dry_run", "help"])
        text = f"is not a known key{known or nearest_key(name)}"
    draft.refuse(name, f"{PLACE}: --{name} {text}")
    return None


def _kind(name: str) -> Any:
    return known_keys()[name].annotation


def _is_switch(kind: Any) -> bool:
    return kind is bool or get_args(kind)[:2] == (False, True)


def _value(name: str, words: list[str]) -> Any:
    """What the words mean for this key; words that mean nothing are left as they are, and refused with the rest."""
    if free_table(name):
        return value_of_words(words)
    kind = _kind(name)
    if get_origin(kind) is list:
        # Several words, or one that is a list as TOML writes it.
        if len(words) == 1 and isinstance(array := value_of_words(words), list):
            return array
        return [_scalar(get_args(kind)[0], word) for word in words]
    if not words and _is_switch(kind):
        return True
    return _scalar(kind, words[0]) if len(words) == 1 else words


def _scalar(kind: Any, word: str) -> Any:
    if get_origin(kind) is Literal:
        return next((choice for choice in get_args(kind) if spelled(choice) == word), word)
    if kind is bool:
        return {"true": True, "false": False}.get(word.lower(), word)
    try:
        return kind(word)
    except ValueError:
        return word
