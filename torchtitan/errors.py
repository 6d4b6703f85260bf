"""Errors that a user can correct: their exception, exit codes, and messages for unknown names and for failures in a
user's own functions."""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import importlib
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torchtitan

# Exit code of a rank whose failure a restart may cure, such as the loss of another rank.
EXIT_RETRYABLE = 75
# Errors of a disk that cannot be written to.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


class UserError(Exception):
    """A mistake of the user or a fault of the environment, printed as one message without a traceback.

    The message says what is wrong, where, and what to do. Entry points turn it into ``exit_code``.
    """

    exit_code = 1


class Unreachable(UserError):
    """Something outside of the run does not answer, and may do so later: a launcher may start all ranks again."""

    exit_code = EXIT_RETRYABLE


class ConfigError(UserError):
    """One or several problems in the configuration, reported together. Exit code 2."""

    exit_code = 2

    def __init__(self, problems: list[str]):
        self.problems = list(problems)
        count = len(self.problems)
        head = "configuration problem" if count == 1 else f"{count} configuration problems"
        super().__init__(head + ":\n" + "\n".join(f"  - {problem}" for problem in self.problems))


def another_package() -> str:
    """What to do where `torchtitan` is another package, whose files have replaced some of ours; else empty.

    Programs ask before they import anything that might be gone. PyPI's torchtitan, installed after this package,
    overwrites torchtitan/__init__.py and torchtitan/config, so nothing there could say it.
    """
    if getattr(torchtitan, "DISTRIBUTION", "") == "torchtitan-grpo":
        return ""
    return (
        f"error: {torchtitan.__file__} belongs to another package that is imported as torchtitan, which has replaced "
        "files of torchtitan-grpo: pip uninstall torchtitan torchtitan-grpo and install torchtitan-grpo anew, or give "
        "each an environment of its own"
    )


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a rank that ends with this error."""
    if isinstance(error, UserError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return UserError.exit_code if isinstance(error, OSError) and error.errno in DISK_ERRORS else EXIT_RETRYABLE


def load_object(name: str, what: str) -> Callable[..., Any]:
    """Load the function or class `package.module:name`; error messages call it `what`.

    Raises:
        UserError: no such module or object, or it is not callable; the message suggests the nearest name.
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
    """Like load_object, for a function that this process calls: its exceptions become a UserError that says where."""
    function = load_object(name, what)

    @functools.wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        with blaming(name, what):
            return function(*arguments, **named)

    return called


@contextlib.contextmanager
def blaming(name: str, what: str) -> Iterator[None]:
    """Make any exception a UserError that says where this function of the user's has raised it."""
    try:
        yield
    except Exception as error:  # a user's function may fail in any way
        place = traceback.extract_tb(error.__traceback__)[-1]
        raised = f"{type(error).__name__}: {error} ({place.filename}, line {place.lineno})"
        raise UserError(f"{what} = {name!r} raised {raised}") from error


def nearest(name: str, known: Iterable[str], least: float = 0.5) -> str:
    """` (nearest: …)` with the most similar known name, or an empty string if none is similar by difflib's ratio."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=least)
    return f" (nearest: {close[0]})" if close else ""
