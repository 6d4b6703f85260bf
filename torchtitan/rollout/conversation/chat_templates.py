"""The chat templates of a checkpoint directory: which there are, which renders a conversation, and what each reads.

template_language.py runs them, and is imported for the first: many checkpoints have none. No torch here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.errors import UserError
from torchtitan.models.shape.checkpoint_files import refuse_pointer
from torchtitan.models.shape.exports import TEMPLATES_FOLDER
from torchtitan.rollout.conversation.messages import Messages, thoughts_as_keys, thoughts_as_parts

if TYPE_CHECKING:
    import jinja2

# transformers' names, see its `get_chat_template`.
DEFAULT, WITH_TOOLS = "default", "tool_use"


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
        return self._read[0]

    @functools.cached_property
    def names(self) -> set[str]:
        """All words by which the template may ask a message for a key. Raises UserError if it is not a template."""
        return self._read[1]

    @functools.cached_property
    def _compiled(self) -> jinja2.Template:
        from torchtitan.rollout.conversation.template_language import environment

        return environment().from_string(self.source)

    @functools.cached_property
    def _read(self) -> tuple[set[str], set[str]]:
        from torchtitan.rollout.conversation.template_language import TemplateError, variables_and_words

        try:
            return variables_and_words(self.source)
        except TemplateError as error:
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
