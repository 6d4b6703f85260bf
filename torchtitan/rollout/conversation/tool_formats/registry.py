"""All formats of tool calls."""

from __future__ import annotations

from torchtitan.rollout.conversation.thoughts import Turn
from torchtitan.rollout.conversation.tool_formats.deepseek import DeepSeek
from torchtitan.rollout.conversation.tool_formats.format import Schemas, ToolCall, ToolFormat, UnreadableCall
from torchtitan.rollout.conversation.tool_formats.glm import Glm
from torchtitan.rollout.conversation.tool_formats.granite import Granite
from torchtitan.rollout.conversation.tool_formats.harmony import Harmony
from torchtitan.rollout.conversation.tool_formats.hermes import Hermes
from torchtitan.rollout.conversation.tool_formats.kimi_k2 import KimiK2
from torchtitan.rollout.conversation.tool_formats.lfm2 import Lfm2
from torchtitan.rollout.conversation.tool_formats.minimax_m2 import MiniMaxM2
from torchtitan.rollout.conversation.tool_formats.mistral import Mistral
from torchtitan.rollout.conversation.tool_formats.olmo3 import Olmo3
from torchtitan.rollout.conversation.tool_formats.phi4_mini import Phi4Mini
from torchtitan.rollout.conversation.tool_formats.qwen3_coder import Qwen3Coder

# What a template shows is looked for in this order, the more specific first.
FORMATS: dict[str, ToolFormat] = {
    form.name: form
    for form in (
        Harmony(),
        DeepSeek(),
        KimiK2(),
        Mistral(),
        MiniMaxM2(),
        Qwen3Coder(),
        Glm(),
        Lfm2(),
        Olmo3(),
        Phi4Mini(),
        Granite(),
        Hermes(),
    )
}
DEFAULT = "hermes"
AUTO = "auto"


def find_format(parser: str, template: str) -> str:
    """Return environment.tool_parser, or instead of "auto" the format that a chat template shows."""
    if parser != AUTO:
        return parser
    for name, form in FORMATS.items():
        marks = (form.template_mark, *form.other_template_marks)
        if any(mark and mark in template for mark in marks):
            return name
    return DEFAULT


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
