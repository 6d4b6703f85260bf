"""Mistakes that a person can correct: the one exception that stands for them, exit codes, and names that are not known,
also those of a person's own functions."""

from __future__ import annotations

import difflib
import errno
import functools
import importlib
import traceback
from collections.abc import Callable, Iterable
from typing import Any

# A rank that ends with this has met what may be over at the next start: another rank that is gone, say.
BROKEN_OFF = 75
# What a disk says that takes no more.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


class UserError(Exception):
    """A mistake of the user's or of the environment: printed as one message, without a traceback.

    The message says what is wrong, where, and what to do. Entry points turn it into ``exit_code``.
    """

    exit_code = 1


class ConfigError(UserError):
    """One or several problems in the configuration, reported together. Exit code 2."""

    exit_code = 2

    def __init__(self, problems: list[str]):
        self.problems = list(problems)
        count = len(self.problems)
        head = "configuration problem" if count == 1 else f"{count} configuration problems"
        super().__init__(head + ":\n" + "\n".join(f"  - {problem}" for problem in self.problems))


def load_object(name: str, what: str) -> Callable[..., Any]:
    """The function or class of `package.module:name`; messages call it `what`.

    Raises:
        UserError: no such module or object, or nothing that can be called; names the nearest that is there.
    """
    module_name, colon, object_name = name.partition(":")
    if not colon or not module_name or not object_name:
        raise UserError(f"{what} {name!r}: it must be `package.module:name`")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may fail in any way
        raise UserError(
            f"{what} {name!r}: module {module_name!r} cannot be imported ({type(error).__name__}: {error})"
        ) from error
    found = getattr(module, object_name, None)
    if not callable(found):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        problem = "has no" if found is None else "has something that is not a function under the name"
        raise UserError(f"{what} {name!r}: {module_name} {problem} {object_name!r}{nearest(object_name, known)}")
    return found


def load_function(name: str, what: str) -> Callable[..., Any]:
    """As load_object, of a function that this process calls itself: what it raises is a UserError that says where."""
    function = load_object(name, what)

    @functools.wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except Exception as error:  # a user's function may fail in any way
            place = traceback.extract_tb(error.__traceback__)[-1]
            raised = f"{type(error).__name__}: {error} ({place.filename}, line {place.lineno})"
            raise UserError(f"{what} = {name!r} raised {raised}") from error

    return called


def nearest(name: str, known: Iterable[str]) -> str:
    """` (nearest: …)` with the known name most like `name`, or an empty string where none is alike."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (nearest: {close[0]})" if close else ""
