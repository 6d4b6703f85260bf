"""All formats of tool calls."""

from __future__ import annotations

from torchtitan.rollout.conversation.thoughts import Turn
from torchtitan.rollout.conversation.tool_formats.deepseek import DeepSeek
from torchtitan.rollout.conversation.tool_formats.format import Schemas, ToolCall, ToolFormat, UnreadableCall
from torchtitan.rollout.conversation.tool_formats.glm import Glm
from torchtitan.rollout.conversation.tool_formats.harmony import Harmony
from torchtitan.rollout.conversation.tool_formats.hermes import Hermes
from torchtitan.rollout.conversation.tool_formats.mistral import Mistral
from torchtitan.rollout.conversation.tool_formats.qwen3_coder import Qwen3Coder

# What a template shows is looked for in this order, the more specific first.
FORMATS: dict[str, ToolFormat] = {
    form.name: form for form in (Harmony(), DeepSeek(), Mistral(), Qwen3Coder(), Glm(), Hermes())
}
DEFAULT = "hermes"
AUTO = "auto"


def find_format(parser: str, template: str) -> str:
    """Return environment.tool_parser, or instead of "auto" the format that a chat template shows."""
    if parser != AUTO:
        return parser
    shown = (name for name, form in FORMATS.items() if form.template_mark and form.template_mark in template)
    return next(shown, DEFAULT)


def read_calls(turn: Turn) -> list[ToolCall]:
    """Return the calls of a turn. Raises ValueError, with a message for the policy, if one cannot be read."""
    for call in turn.calls:
        if isinstance(call, UnreadableCall):
            raise ValueError(str(call))
    return turn.calls


def parse_tool_calls(text: str, form: str = DEFAULT, tools: Schemas = ()) -> tuple[str, list[ToolCall]]:
    """Return (what a turn says beside its calls, the calls outside of its thoughts).

    Args:
        text: the turn as marked text (marks.py).
        form: a name of FORMATS.
        tools: their JSON schemas, which say the types of arguments.

    Raises:
        ValueError: text that is marked as a call cannot be read; the message is for the policy.
    """
    turn = FORMATS[form].read(text, tools=tools)
    return turn.shown(), read_calls(turn)
