"""Messages become tokens, each message once: what was sampled stays as it was sampled.

A conversation that goes on is not rendered anew. Rendering what the policy has said gives other tokens than those it
sampled (a tokenizer is no bijection, templates drop and rewrite things), and log-probs of tokens that never were. So
only the messages that are new become tokens, behind those that are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchtitan.errors import UserError
from torchtitan.rollout.tokenizer import Tokenizer

Messages = Sequence[dict[str, Any]]

# Stands for what the policy has said, which is not rendered: no template changes it, and none contains it.
SAID = "zqxSAIDxqz"
# Roles whose text is no part of the template: a special token's name in it is text.
FOREIGN = ("user", "system", "developer", "tool", "function", "ipython")


class ChatRenderer:
    """Tokens of messages, with the tokenizer's own chat template."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def whole(self, messages: Messages, tools: Messages) -> list[int]:
        """The prompt of a conversation that begins. Raises UserError where the template refuses it."""
        return self._tokenizer.apply_chat_template(self._shielded(messages), tools=self._shield(list(tools)))

    def goes_on(self, held: list[int], ended: bool, messages: Messages, tools: Messages) -> list[int] | None:
        """The prompt that continues tokens which end with what the policy has said: `held` and the new messages.

        ended: the last token is the one that ended it. None where the template does not show what the messages add.
        """
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": SAID}, *self._shielded(messages)]
        try:
            text = self._tokenizer.render_chat(said, True, self._shield(list(tools)))
        except UserError:
            return None
        _, found, behind = text.rpartition(SAID)
        if not found:
            return None
        # What ends the policy's turn stands there already, where the policy has ended it.
        last = self._tokenizer.decode(held[-1:], skip_special=False) if ended else ""
        return held + self._tokenizer.encode_shielded(behind.removeprefix(last))

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
