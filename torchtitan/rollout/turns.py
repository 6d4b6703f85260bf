"""The tokens between two turns of a conversation. What the policy has sampled is never rendered or tokenised again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchtitan.errors import UserError
from torchtitan.rollout.tokenizer import Tokenizer

# A conversation behind which new messages are rendered, to see what the template writes for them.
CALL = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {}}}


class TurnRenderer:
    """Renders messages that follow a sampled turn, as the chat template would, or as bare text without one.

    The template renders a conversation of a dummy turn and the new messages; what it writes behind the dummy turn's end
    token is what comes behind the sampled one's.
    """

    def __init__(self, tokenizer: Tokenizer, chat: bool):
        self._tokenizer, self._chat = tokenizer, chat
        self._ends = [tokenizer.decode([token], skip_special=False) for token in tokenizer.eos_token_ids]

    def tokens(self, messages: Sequence[dict[str, Any]], ended: bool) -> list[int]:
        """What goes between a turn and the next one. Text of messages that is spelled like special tokens stays text.

        ended: the turn's last token is an end token of the checkpoint, which is not written again.

        Raises:
            UserError: the template writes earlier messages differently where others follow.
        """
        shielded = [{**message, "content": self._tokenizer.shield(message["content"])} for message in messages]
        if not self._chat:
            return self._tokenizer.encode_shielded("".join(message["content"] for message in shielded))
        turn: dict[str, Any] = {"role": "assistant", "content": "x"}
        if any(message["role"] == "tool" for message in messages):
            turn["tool_calls"] = [CALL for _ in messages]
        before = [{"role": "user", "content": "x"}, turn]
        held = self._tokenizer.render_chat(before, add_generation_prompt=False)
        whole = self._tokenizer.render_chat([*before, *shielded])
        place, end = max(((held.rfind(end), end) for end in self._ends if end), default=(-1, ""))
        cut = len(held) if place < 0 else place + len(end) * ended
        if not whole.startswith(held[:cut]):
            raise UserError(
                f"the chat template of {self._tokenizer.directory} writes a turn differently once others follow it, so "
                "that a conversation cannot go on from what was sampled: take a template that keeps its prefixes"
            )
        return self._tokenizer.encode_shielded(whole[cut:])
