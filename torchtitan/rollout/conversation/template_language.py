"""The language of chat templates: jinja2 in its sandbox, set up as in transformers. No torch here."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["TemplateError", "environment", "variables_and_words"]


class _GenerationBlock(Extension):
    """`{% generation %}`, which marks the assistant's part for training masks; here it only renders its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **form: Any) -> str:
    # jinja2's own filter escapes HTML, which would change the prompt. The options are those of transformers.
    return json.dumps(value, ensure_ascii=ensure_ascii, **form)


def environment() -> jinja2.Environment:
    """The sandbox in which templates run, with what transformers offers them."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return sandbox


def variables_and_words(source: str) -> tuple[set[str], set[str]]:
    """Names of the variables that a template reads, and all words by which it may ask a message for a key. Raises
    TemplateError."""
    tree = environment().parse(source)
    words = {str(constant.value) for constant in tree.find_all(nodes.Const) if isinstance(constant.value, str)}
    return meta.find_undeclared_variables(tree), words | {access.attr for access in tree.find_all(nodes.Getattr)}
