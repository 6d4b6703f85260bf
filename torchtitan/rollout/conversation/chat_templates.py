"""The chat templates of a checkpoint directory: which there are, which renders a conversation, and what each reads.

Templates run in jinja2's sandbox. No torch here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from torchtitan.errors import UserError
from torchtitan.models.shape.checkpoint_files import refuse_pointer
from torchtitan.models.shape.exports import TEMPLATES_FOLDER
from torchtitan.rollout.conversation.messages import Messages, thoughts_as_keys, thoughts_as_parts

# transformers' names, see its `get_chat_template`.
DEFAULT, WITH_TOOLS = "default", "tool_use"


class _GenerationBlock(Extension):
    """`{% generation %}`, which marks the assistant's part for training masks; here it only renders its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **form: Any) -> str:
    # jinja2's own filter escapes HTML, which would change the prompt. The options are those of transformers.
    return json.dumps(value, ensure_ascii=ensure_ascii, **form)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class ChatTemplate:
    """One template."""

    def __init__(self, source: str, directory: Path):
        self.source = source
        self._directory = directory

    def render(self, messages: Messages, values: Mapping[str, Any]) -> str:
        """Return the text of a conversation. values: the template's other variables. May raise anything."""
        if any("reasoning_content" in message for message in messages):
            spread = thoughts_as_parts if self._reads_parts else thoughts_as_keys
            messages = [spread(message) for message in messages]
        return self._compiled.render(messages=list(messages), **values)

    @functools.cached_property
    def variables(self) -> set[str]:
        """Names of the variables that the template reads. Raises UserError if it is not a template."""
        return meta.find_undeclared_variables(self._tree)

    @functools.cached_property
    def names(self) -> set[str]:
        """All words by which the template may ask a message for a key. Raises UserError if it is not a template."""
        found = {str(node.value) for node in self._tree.find_all(nodes.Const) if isinstance(node.value, str)}
        return found | {node.attr for node in self._tree.find_all(nodes.Getattr)}

    @functools.cached_property
    def _compiled(self) -> jinja2.Template:
        return _environment().from_string(self.source)

    @functools.cached_property
    def _tree(self) -> nodes.Template:
        try:
            return _environment().parse(self.source)
        except jinja2.exceptions.TemplateError as error:
            raise UserError(f"the chat template of {self._directory} cannot be read: {error}") from error

    @functools.cached_property
    def _reads_parts(self) -> bool:
        """Whether a thought must be a part of the content, as for Magistral, because no key of a message is read."""
        thought = "a thought of its own"
        answer = {"role": "assistant", "content": "?", "reasoning_content": thought}
        found = []
        for spread in (thoughts_as_keys, thoughts_as_parts):
            try:
                text = self._compiled.render(messages=[{"role": "user", "content": "?"}, spread(answer)])
            except Exception:  # a template runs code and may raise anything, here for want of its other variables
                text = ""
            # A template that expects text may write a list as Python or JSON does.
            found.append(thought in text and "'type'" not in text and '"type"' not in text)
        return found == [False, True]


class ChatTemplates:
    """The templates of a checkpoint directory by name; false if there is none."""

    def __init__(self, directory: Path, settings: Mapping[str, Any]):
        """settings: the content of tokenizer_config.json. Raises UserError for a file that cannot be read."""
        self.directory = directory
        sources = _from_files(directory) or _from_settings(settings)
        self._named = {name: ChatTemplate(source, directory) for name, source in sources.items() if source}

    def __bool__(self) -> bool:
        return bool(self._named)

    def choose(self, tools: bool) -> ChatTemplate:
        """Return the template of conversations with or without tools, as transformers chooses it. Raises UserError if
        there is none for them."""
        if not self._named:
            raise UserError(
                f"{self.directory} has no chat template (neither chat_template.jinja nor chat_template in "
                "tokenizer_config.json): set rollout.chat_template = false or take an instruction-tuned checkpoint"
            )
        for name in (WITH_TOOLS, DEFAULT) if tools else (DEFAULT,):
            if name in self._named:
                return self._named[name]
        raise UserError(
            f"{self.directory} has the chat templates {', '.join(sorted(self._named))}, but none is called {DEFAULT}: "
            "write the one to use to chat_template.jinja in that directory"
        )

    @property
    def sources(self) -> dict[str, str]:
        """The text of each, by name."""
        return {name: template.source for name, template in self._named.items()}

    @property
    def variables(self) -> set[str]:
        """Names of the variables that any of them reads. Raises UserError if one is not a template."""
        return {name for template in self._named.values() for name in template.variables}


def _from_files(directory: Path) -> dict[str, str]:
    paths = {DEFAULT: directory / "chat_template.jinja"}
    paths |= {path.stem: path for path in sorted((directory / TEMPLATES_FOLDER).glob("*.jinja"))}
    found = {}
    for name, path in paths.items():
        if path.is_file():
            refuse_pointer(path)
            try:
                found[name] = path.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise UserError(f"{path} cannot be read: {error}") from error
    return found


def _from_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    given = settings.get("chat_template")
    if isinstance(given, list):
        return {entry["name"]: entry["template"] for entry in given}
    return given if isinstance(given, dict) else {DEFAULT: given or ""}
