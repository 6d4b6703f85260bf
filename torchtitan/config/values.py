"""What the values of keys may be besides their type, as annotations that pydantic checks, and how TOML has them: a file
read with its mistakes as text, and a configuration written so that it reads back the same.

    steps: Count = 100
    transport: Annotated[str, Names(("tcp", "disk"))] = "tcp"

Combinations of keys are checked in torchtitan/preflight.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import tomli
from pydantic import AfterValidator, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from torchtitan.errors import nearest

# Nothing but an integer where a number is asked for is converted; the string under a field documents it (reference.py,
# as pydantic would read every table's source in every process). A table's checks are made when it is first filled.
TABLE = ConfigDict(strict=True, extra="forbid", defer_build=True)

RULE = "rule"
"""The type of the errors that rules raise"""
OPTIONS = "a table of options, each a string, a number, true, false, a list or a table of these"
SHIPPED = Path(__file__).resolve().parent.parent / "train_configs"


class Rule:
    """Annotation of a key. pydantic calls it with every value of the right type."""

    def problem(self, value: Any) -> str | None:
        """What the value must be, or None where it is allowed."""
        raise NotImplementedError

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: Any) -> Any:
        if (problem := self.problem(value)) is not None:
            raise PydanticCustomError(RULE, "{problem}", {"problem": problem})
        return value


@dataclass(frozen=True)
class Range(Rule):
    """An interval of numbers; `also` names one value outside it that has a meaning of its own (-1, 0)."""

    low: float
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False
    also: float | None = None

    def __contains__(self, value: float) -> bool:
        if self.also is not None and value == self.also:
            return True
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return math.isfinite(value) and above and below

    def __str__(self) -> str:
        low = f"greater than {self.low:.10g}" if self.low_open else f"at least {self.low:.10g}"
        if self.high == math.inf:
            text = low
        elif self.low_open or self.high_open:
            text = f"{low} and {'less than' if self.high_open else 'at most'} {self.high:.10g}"
        else:
            text = f"{self.low:.10g} to {self.high:.10g}"
        return text if self.also is None else f"{self.also:.10g}, or {text}"

    def problem(self, value: float) -> str | None:
        if value in self:
            return None
        return f"must be {self}" if math.isfinite(value) else f"must be finite, {self}"


@dataclass(frozen=True)
class Names(Rule):
    """Names that are known; with `own_function`, `package.module:function` may take the place of one."""

    known: tuple[str, ...]
    own_function: bool = False

    def __str__(self) -> str:
        return ", ".join(f"`{name}`" for name in self.known)

    def problem(self, value: str) -> str | None:
        if value in self.known or (self.own_function and all(value.partition(":"))):
            return None
        return f"must be {' or '.join(self.known)}{nearest(value, self.known)}"


@dataclass(frozen=True)
class Must(Rule):
    """Whatever else a value must satisfy, and how to say so."""

    holds: Callable[[Any], object]
    otherwise: str

    def problem(self, value: Any) -> str | None:
        return None if self.holds(value) else self.otherwise


@dataclass(frozen=True)
class Hyphenated:
    """Annotation of a table of options: in their names, underscores and hyphens are the same."""


def option_name(key: str) -> str:
    """A key as a program's option is spelled, without its hyphens: max_model_len and max-model-len are the same."""
    head, dot, rest = key.partition(".")
    return head.replace("_", "-") + dot + rest


def is_free(value: Any) -> bool:
    """Whether a free table may hold this: strings, numbers, booleans, lists and tables of them (TOML has dates too)."""
    if isinstance(value, dict):
        return all(map(is_free, value.values()))
    if isinstance(value, list):
        return all(map(is_free, value))
    return isinstance(value, (str, int, float))


def _is_band(values: list[float]) -> bool:
    return len(values) == 2 and all(map(math.isfinite, values)) and 0 <= values[0] < values[1]


Count = Annotated[int, Range(1)]
CountOrZero = Annotated[int, Range(0)]
NotNegative = Annotated[float, Range(0)]
Positive = Annotated[float, Range(0, low_open=True)]
Share = Annotated[float, Range(0, 1)]
ShareBelowOne = Annotated[float, Range(0, 1, high_open=True)]
ShareAboveZero = Annotated[float, Range(0, 1, low_open=True)]
Weights = Annotated[list[float], Must(lambda values: all(map(math.isfinite, values)), "each must be finite")]
Band = Annotated[list[float], Must(_is_band, "must be two numbers [low, high], 0 <= low < high")]
BandOrNone = Annotated[
    list[float],
    Must(lambda band: not band or _is_band(band), "must be empty, or two numbers [low, high], 0 <= low < high"),
]
Options = Annotated[dict[str, Any], Must(is_free, f"it takes {OPTIONS}")]
EngineOptions = Annotated[dict[str, Any], Must(is_free, f"it takes {OPTIONS}"), Hyphenated()]
# A leading `~` is resolved here, once; `~nobody` stays, and is refused as a missing folder.
PathText = Annotated[str, AfterValidator(os.path.expanduser)]
Column = Annotated[str, Must(bool, "must name a column")]
OnceEach = Annotated[list[str], Must(lambda names: len(set(names)) == len(names), "each may be named only once")]
ServerUrl = Annotated[
    str,
    Must(
        re.compile(r"(https?://[^/\s]+/?)?").fullmatch,
        "must be a URL such as http://127.0.0.1:8000, without a path",
    ),
]
RunName = Annotated[
    str,
    Must(
        re.compile(r"(?!\.)[\w.+-]+").fullmatch,
        "must be made of letters, digits, `_`, `.`, `+` and `-` (it names a folder)",
    ),
]


def without_none(kind: Any) -> Any:
    """The type of an optional value without None and rules."""
    if type(None) not in get_args(kind):
        return kind
    kind = next(option for option in get_args(kind) if option is not type(None))
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def read_toml(file: str) -> tuple[dict[str, Any], str]:
    """The tables of a file, or none and what is wrong with the file."""
    path = Path(os.path.expanduser(file))
    may_be_shipped = str(path.parent) in (".", "train_configs")
    try:
        if may_be_shipped and not path.exists():
            # One of those that come with the package, by its name.
            shipped = SHIPPED / f"{path.name.removesuffix('.toml')}.toml"
            path = shipped if shipped.is_file() else path
        # Some editors begin a file with a byte order mark.
        return tomli.loads(path.read_text(encoding="utf-8-sig")), ""
    except FileNotFoundError:
        text = f"does not exist (looked in {path.parent.absolute()})"
        close = nearest(path.name, [other.name for other in path.parent.glob("*.toml")])
        if not close and may_be_shipped:
            # Their names end alike, so that half of it in common says nothing.
            names = [other.name.removesuffix(".toml") for other in SHIPPED.glob("*.toml")]
            close = nearest(path.name.removesuffix(".toml"), names, least=0.8)
        text += close
    except OSError as error:
        text = f"cannot be read: {error.strerror}"
    except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        text = f"is not valid TOML: {error}"
    except RecursionError:
        text = "cannot be read: its lists or tables are nested too deeply"
    return {}, text


def value_of_words(words: list[str]) -> Any:
    """What the words behind an option of an engine mean: none is true, several are a list; TOML values or else text."""
    if not words:
        return True
    values = [_value(word) for word in words]
    return values[0] if len(values) == 1 else values


def _value(word: str) -> Any:
    try:
        tables = tomli.loads(f"value = {word}")
    except (tomli.TOMLDecodeError, RecursionError):
        return word
    # More than one key: the word had a line break in it.
    return tables["value"] if len(tables) == 1 and is_free(tables) else word


def show(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{show_key(name)} = {show(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(show, value)) + "]"
    if isinstance(value, float):
        return repr(value)  # 1e-06, 0.5, inf and nan are TOML as they are
    # JSON's strings, numbers and booleans are TOML's, but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007F")


def spelled(choice: Any) -> str:
    """One of a key's values as its documentation writes it, without quotes."""
    return choice if isinstance(choice, str) else show(choice)


def show_key(name: str) -> str:
    """A key as TOML writes it: quoted where it must be."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else show(name)
