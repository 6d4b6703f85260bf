"""The command line: `--table.key value…` on top of a TOML file, `--dry-run` and `--help`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

from torchtitan.config.draft import OLD_NAMES, Draft, nearest_key
from torchtitan.config.engine_args import PREFIX
from torchtitan.config.job_config import known_keys
from torchtitan.config.reference import help_text
from torchtitan.config.toml import value_of_words
from torchtitan.config.values import nearest

PLACE = "command line"


@dataclass
class CommandLine:
    """A command line taken apart, its keys checked; the values are still text."""

    overrides: list[tuple[str, list[str]]] = field(default_factory=list)
    """(`table.key`, words) in the order given"""
    dry_run: bool = False
    draft: Draft = field(default_factory=Draft)
    """Holds the mistakes, until `fill` adds the values"""

    def refuse(self, key: str, text: str) -> None:
        self.draft.refuse(key, f"{PLACE}: {text}")

    def fill(self) -> Draft:
        """The draft, with the file's values and these on top."""
        files = [words[0] for key, words in self.overrides if key == "job.config_file" and len(words) == 1]
        if files and files[-1]:
            self.draft.add_file(files[-1])
        for key, words in self.overrides:
            self.draft.set(key, _value(key, words), PLACE, " ".join(words) or "(no value)")
        return self.draft


def split_command_line(argv: Sequence[str]) -> CommandLine:
    """Take `--table.key value…`, `--table.key=value`, `--table.flag`, `--table.no-flag` and `--dry-run` apart.

    --help prints every key and exits with code 0.
    """
    command = CommandLine()
    words: list[str] | None = None
    for token in argv:
        if token in ("-h", "--help"):
            print(help_text())
            raise SystemExit(0)
        if token.startswith("--"):
            name, equals, inline = token[2:].partition("=")
            words = [inline] if equals else []
            if not _take_option(command, name, words):
                words = None
        elif words is None:
            command.refuse("", f"{token!r} belongs to no --table.key")
        else:
            words.append(token)
    return command


def _take_option(command: CommandLine, option: str, words: list[str]) -> bool:
    """Whether more words may follow as its value."""
    name = option.replace("-", "_")
    if name.startswith(PREFIX):
        command.overrides.append((PREFIX + option[len(PREFIX) :], words))
        return True
    if name == "dry_run" and not words:
        command.dry_run = True
        return False
    table, _, key = name.rpartition(".")
    switched_off = f"{table}.{key.removeprefix('no_')}"
    if name == PREFIX[:-1]:
        command.refuse(name, f"--{name} needs the name of an option, such as --{PREFIX}max-model-len 1024")
    elif name in known_keys() or name in OLD_NAMES:
        command.overrides.append((name, words))
    elif key.startswith("no_") and switched_off in known_keys() and _kind(switched_off) is bool and not words:
        command.overrides.append((switched_off, ["false"]))
        return False
    else:
        known = nearest_key(name) if "." in name else nearest(name, ["dry_run", "help", *known_keys()])
        command.refuse(name, f"--{name} is not a known key{known}")
    return True


def _kind(name: str) -> Any:
    return known_keys()[OLD_NAMES.get(name, name)].annotation


def _value(name: str, words: list[str]) -> Any:
    """What the words mean for this key; words that mean nothing are left as they are, and refused with the rest."""
    if name.startswith(PREFIX):
        return value_of_words(words)
    kind = _kind(name)
    if get_origin(kind) is list:
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
