"""What a chat template writes of a conversation, found by rendering small ones, once for each question."""

from __future__ import annotations

from typing import Any, Protocol

from torchtitan.errors import UserError
from torchtitan.rollout.conversation.chat_templates import ChatTemplates
from torchtitan.rollout.conversation.messages import ASSISTANT, TOOL, Messages

# Mistral's templates accept only ids of nine characters.
CALL_ID = "0" * 9
USER = {"role": "user", "content": "?"}


class Renderer(Protocol):
    """What is needed of a tokenizer."""

    templates: ChatTemplates

    def render_chat(self, messages: Messages, add_generation_prompt: bool = True, tools: Messages = ()) -> str: ...


class TemplateChecks:
    """Answers questions about the templates of a checkpoint. Tools may choose the template, so each answer is kept for
    conversations with and without them; their texts must be shielded."""

    def __init__(self, tokenizer: Renderer, mark: str):
        """mark: a random text, which no message contains."""
        self._tokenizer, self._mark = tokenizer, mark
        self._rendered: dict[tuple[str, bool], str | UserError] = {}

    def hidden_result(self, tools: Messages) -> str:
        """Why the template does not write what a tool returned; empty if it does."""
        text = self._render("result", [USER, self._turn("look"), _result(f"{self._mark}: 1", name="look")], tools)
        if isinstance(text, UserError):
            return str(text.__cause__)
        return "" if f"{self._mark}: 1" in text else "it leaves out the role `tool`"

    def names_results(self, tools: Messages) -> bool:
        """Whether the template reads the name of a function from the message with its result."""
        named = self._render("result", [USER, self._turn("look"), _result(f"{self._mark}: 1", name="look")], tools)
        nameless = self._render("nameless", [USER, self._turn("look"), _result(f"{self._mark}: 1")], tools)
        return str(named) != str(nameless)

    def leaves_out_calls(self, tools: Messages, beside_text: bool = False) -> bool:
        """Whether the template writes a turn of the assistant without its calls, as the first one of LFM2 does.
        beside_text: where the turn has a text, too."""
        turn = {**self._turn(f"{self._mark}_called"), "content": "!" if beside_text else ""}
        # No result stands behind it, which would repeat the name.
        text = self._render(f"call {beside_text}", [USER, turn], tools)
        return isinstance(text, str) and f"{self._mark}_called" not in text

    def writes_several_calls(self, tools: Messages) -> bool:
        """Whether the template writes all calls of a turn: that of gpt-oss writes the first, Llama 3's refuses more."""
        turn = self._turn("look", f"{self._mark}_again")
        text = self._render("calls", [USER, turn, _result("1", name="look")], tools)
        return isinstance(text, str) and f"{self._mark}_again" in text

    def writes_role(self, role: str, tools: Messages, behind_the_first: bool = False) -> bool:
        """Whether the template writes a message of a role in the middle of a conversation or, if it is the system's or
        a developer's, behind the first one."""
        message, place = {"role": role, "content": self._mark}, "first" if behind_the_first else "later"
        before = [{"role": role, "content": "?"}] if behind_the_first else [USER, {"role": ASSISTANT, "content": "!"}]
        text = self._render(f"{place} {role}", [*before, message, USER], tools)
        return isinstance(text, str) and self._mark in text

    def _turn(self, *names: str) -> dict[str, Any]:
        """Return a turn of the assistant that calls these functions."""
        functions = [{"name": name, "arguments": {"x": "1"}} for name in names]
        calls = [{"type": "function", "id": CALL_ID, "function": function} for function in functions]
        return {"role": ASSISTANT, "content": "", "tool_calls": calls}

    def _render(self, name: str, messages: Messages, tools: Messages) -> str | UserError:
        key = name, bool(tools)
        if key not in self._rendered:
            try:
                self._rendered[key] = self._tokenizer.render_chat(messages, tools=tools)
            except UserError as error:
                self._rendered[key] = error
        return self._rendered[key]


def _result(text: str, **more: str) -> dict[str, Any]:
    return {"role": TOOL, "tool_call_id": CALL_ID, "content": text, **more}
