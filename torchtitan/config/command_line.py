"""The command line: `--table.key value…` on top of a TOML file, `--dry-run` and `--help`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

from torchtitan.config.draft import GONE_KEYS, Draft, nearest_key
from torchtitan.config.job_config import free_table, known_keys
from torchtitan.config.reference import help_text
from torchtitan.config.toml import value_of_words
from torchtitan.utils.loading import nearest

PLACE = "command line"


def read_command_line(argv: Sequence[str]) -> tuple[Draft, bool]:
    """The draft of what the words say, on top of the last --job.config_file, and whether --dry-run is among them.

    Understands `--table.key value…`, `--table.key=value`, `--table.flag` and `--table.no-flag`. --help prints every key
    and exits with code 0.
    """
    if {"-h", "--help"} & set(argv):
        print(help_text())
        raise SystemExit(0)
    draft = Draft()
    options: list[tuple[str, list[str]]] = []
    for token in argv:
        if token.startswith("--"):
            name, equals, value = token[2:].partition("=")
            options.append((name, [value] if equals else []))
        elif options:
            options[-1][1].append(token)
        else:
            draft.refuse("", f"{PLACE}: {token!r} belongs to no --table.key")
    settings = [setting for name, words in options if (setting := _setting(draft, name, words)) is not None]
    files = [words[0] for key, words in settings if key == "job.config_file" and len(words) == 1]
    if files and files[-1]:
        draft.add_file(files[-1])
    for key, words in settings:
        draft.set(key, _value(key, words), PLACE, " ".join(words) or "(no value)")
    return draft, any(name.replace("-", "_") == "dry_run" for name, _ in options)


def _setting(draft: Draft, option: str, words: list[str]) -> tuple[str, list[str]] | None:
    """(`table.key`, its words) for an option, or None where it is a mistake or sets no value."""
    name = option.replace("-", "_")
    table, _, key = name.rpartition(".")
    positive = f"{table}.{key.removeprefix('no_')}"
    if free := free_table(name):
        return free + option[len(free) :], words
    takes_options = free_table(f"{name}.") == name
    if not takes_options and (name in known_keys() or name in GONE_KEYS):
        return name, words
    switches_off = positive != name and positive in known_keys() and _kind(positive) is bool
    if name == "dry_run" or switches_off:
        if words:
            draft.refuse(name, f"{PLACE}: {words[0]!r} belongs to no --table.key: --{option} takes no value")
        return (positive, ["false"]) if switches_off else None
    if takes_options:
        text = f"needs the name of an option, such as --{name}.NAME VALUE"
    else:
        known = nearest_key(name) if table else nearest(name, ["dry_run", "help", *known_keys()])
        text = f"is not a known key{known}"
    draft.refuse(name, f"{PLACE}: --{name} {text}")
    return None


def _kind(name: str) -> Any:
    return known_keys()[name].annotation


def _value(name: str, words: list[str]) -> Any:
    """What the words mean for this key; words that mean nothing are left as they are, and refused with the rest."""
    if free_table(name):
        return value_of_words(words)
    if name in GONE_KEYS:
        return " ".join(words)
    kind = _kind(name)
    if get_origin(kind) is list:
        # Several words, or one that is a list as TOML writes it.
        if len(words) == 1 and isinstance(array := value_of_words(words), list):
            return array
        return [_scalar(get_args(kind)[0], word) for word in words]
    if kind is bool and not words:
        return True
    return _scalar(kind, words[0]) if len(words) == 1 else words


def _scalar(kind: Any, word: str) -> Any:
    if get_origin(kind) is Literal:
        return next((choice for choice in get_args(kind) if str(choice) == word), word)
    if kind is bool:
        return {"true": True, "false": False}.get(word.lower(), word)
    try:
        return kind(word)
    except ValueError:
        return word
