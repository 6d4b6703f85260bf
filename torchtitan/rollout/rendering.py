"""Messages become tokens, each message once: what was sampled stays as it was sampled.

A conversation that goes on is not rendered anew. Rendering what the policy has said gives other tokens than those it
sampled (a tokenizer is no bijection, templates drop and rewrite things), and log-probs of tokens that never were. So
only the messages that are new become tokens, behind those that are there.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from torchtitan.errors import UserError
from torchtitan.rollout.tokenizer import Tokenizer

Messages = Sequence[dict[str, Any]]

# Roles whose text comes from outside: where it spells the name of a special token, that stays text.
FOREIGN = ("user", "system", "developer", "tool", "function", "ipython")


class ChatRenderer:
    """Tokens of messages, with the tokenizer's own chat template."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        # Stands for the policy's turn, which is not rendered; random, so that no message contains it.
        self._mark = f"said{secrets.token_hex(8)}"
        self._ends = [tokenizer.decode([token], skip_special=False) for token in tokenizer.eos_token_ids]

    def whole(self, messages: Messages, tools: Messages) -> list[int]:
        """The prompt of a conversation that begins. Raises UserError where the template refuses it."""
        return self._tokenizer.apply_chat_template(self._shielded(messages), tools=self._shield(list(tools)))

    def following(self, held: Sequence[int], messages: Messages, tools: Messages = ()) -> list[int]:
        """What the template writes behind `held`, which ends with a turn of the policy, for the messages that follow.

        The turn's end is written there where the policy was cut off before it. Raises UserError where the template does
        not show what the messages add.
        """
        turn: dict[str, Any] = {"role": "assistant", "content": self._mark}
        call = {"type": "function", "id": "call00000", "function": {"name": self._mark, "arguments": {}}}
        if calls := [call for message in messages if message.get("role") == "tool"]:
            turn["tool_calls"] = calls
        before, tools = [{"role": "user", "content": "?"}, turn], self._shield(list(tools))
        held_text = self._tokenizer.render_chat(before, False, tools)
        whole_text = self._tokenizer.render_chat([*before, *self._shielded(messages)], True, tools)
        # Earlier messages may be written differently where others follow them.
        _, found, behind = held_text.rpartition(self._mark)
        _, found_again, text = whole_text.rpartition(self._mark)
        place, end = max(((behind.rfind(end), end) for end in self._ends if end), default=(-1, ""))
        if place < 0:
            # No end is written: what is behind a call belongs to it, what is behind a text parts it from the next one.
            cut = len(behind) if calls else 0
        else:
            cut = place + len(end) * (held[-1] in self._tokenizer.eos_token_ids)
        if not found or not found_again or not text.startswith(behind[:cut]):
            raise UserError(
                f"the chat template of {self._tokenizer.directory} writes a turn differently once others follow it, so "
                "that a conversation cannot go on from what was sampled: take a template that keeps its prefixes"
            )
        return self._tokenizer.encode_shielded(text[cut:])

    def following_text(self, messages: Messages) -> list[int]:
        """The same without a template: the bare texts."""
        return self._tokenizer.encode_shielded("".join(self._shield(message["content"]) for message in messages))

    def _shielded(self, messages: Messages) -> list[dict[str, Any]]:
        return [
            {key: value if key == "role" else self._shield(value) for key, value in message.items()}
            if message.get("role") in FOREIGN
            else message
            for message in messages
        ]

    def _shield(self, value: Any) -> Any:
        """All texts in it."""
        if isinstance(value, str):
            return self._tokenizer.shield(value)
        if isinstance(value, list):
            return [self._shield(one) for one in value]
        if isinstance(value, dict):
            return {key: self._shield(one) for key, one in value.items()}
        return value
