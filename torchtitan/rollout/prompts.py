"""The stream of training prompts: every pass over the rows in its own order, resumable at any position."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
from collections.abc import Sequence
from typing import Any

from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.rollout.tokenizer import Tokenizer
from torchtitan.rollout.types import Prompt

logger = logging.getLogger(__name__)

# What templates of reasoning models put at the beginning of the answer: a thought that is open, or empty.
PREFILL = re.compile(r"<think>\s*(?:</think>\s*)?$")
PREFILL_TOKENS = 32


class PromptMaker:
    """Makes Prompts of dataset rows; shared by training and evaluation.

    Reward functions see the prompt as the dataset holds it (text stays text), whatever the chat template makes of it.
    """

    def __init__(self, config: JobConfig, tokenizer: Tokenizer):
        self._rollout = config.rollout
        self._answer_column = config.rewards.answer_column
        self._tokenizer = tokenizer
        self.longest = config.training.seq_len - config.rollout.max_completion_tokens
        """Prompts with more tokens leave no room for a whole completion within training.seq_len"""
        self.limit = f"training.seq_len - rollout.max_completion_tokens = {self.longest}"
        self.tools: list[dict[str, Any]] = []
        """JSON schemas of what the policy may call, which chat templates write into prompts"""
        if self._rollout.chat_template and not tokenizer.has_chat_template:
            raise UserError(
                "rollout.chat_template = true, but the checkpoint's tokenizer files hold no chat template: take an "
                "instruction-tuned checkpoint or set rollout.chat_template = false"
            )

    def make(self, row: dict[str, Any], index: int) -> Prompt:
        """The prompt of a row, tokenised.

        Raises:
            UserError: chat messages where the tokenizer has no chat template.
        """
        content = row[self._rollout.prompt_column]
        token_ids = self._tokenise(content)
        return Prompt(index, content, token_ids, self._columns(row), self._prefill(token_ids))

    def extended(self, prompt: Prompt, text: str) -> list[int]:
        """The tokens of a prompt to which an environment adds `text`: at its end, or to its last message."""
        if not text:
            return prompt.token_ids
        if isinstance(prompt.text, str) and not self._rollout.chat_template:
            return prompt.token_ids + self._tokenizer.encode_shielded(self._tokenizer.shield(text))
        messages = self._messages(prompt.text)
        last = messages[-1]
        messages[-1] = {**last, "content": f"{last['content']}{self._tokenizer.shield(text)}"}
        return self._tokenizer.apply_chat_template(messages, tools=self.tools)

    def fits(self, prompt: Prompt) -> bool:
        return 0 < len(prompt.token_ids) <= self.longest

    def length(self, prompt: Prompt) -> int:
        """The tokens for which there must be room."""
        return len(prompt.token_ids)

    def _columns(self, row: dict[str, Any]) -> dict[str, Any]:
        columns = {name: value for name, value in row.items() if name != self._rollout.prompt_column}
        if self._answer_column in columns:
            columns.setdefault("answer", columns[self._answer_column])
        return columns

    def _prefill(self, token_ids: list[int]) -> str:
        found = PREFILL.search(self._tokenizer.decode(token_ids[-PREFILL_TOKENS:], skip_special=False))
        return found[0] if found else ""

    def _tokenise(self, content: str | list[dict[str, Any]]) -> list[int]:
        if isinstance(content, str) and not self._rollout.chat_template:
            return self._tokenizer.encode_prompt(content)
        return self._tokenizer.apply_chat_template(self._messages(content), tools=self.tools)

    def _messages(self, content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
        if self._rollout.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._rollout.system_prompt})
        return messages


def first_held_out(rows: Sequence[dict[str, Any]], maker: PromptMaker, count: int) -> list[Prompt]:
    """The first `count` of the held-out prompts that fit, in an order that is the same in every run."""
    order = list(range(len(rows)))
    random.Random("held out").shuffle(order)
    prompts: list[Prompt] = []
    for index in order:
        if len(prompts) == count:
            break
        prompt = maker.make(rows[index], index)
        if maker.fits(prompt):
            prompts.append(prompt)
    return prompts


class PromptStream:
    """Endless stream of prompts over `rows`, shuffled anew in every pass from `seed`.

    Prompt.index is the position in the stream; a row that is too long keeps its position and is left out, so an index
    means the same prompt whatever the length limits are.
    """

    def __init__(self, rows: Sequence[dict[str, Any]], maker: PromptMaker, seed: int, shuffle: bool = True):
        if not rows:
            raise UserError("there are no training prompts")
        self._rows = rows
        self._maker = maker
        self._seed = seed
        self._shuffle = shuffle
        self._position = 0
        self._order: tuple[int, Sequence[int]] = (-1, ())
        self._digest: str | None = None
        self.dropped = 0
        """Prompts left out so far because they are too long"""

    @property
    def position(self) -> int:
        """How many prompts of the stream have been drawn or left out."""
        return self._position

    def next(self) -> Prompt:
        """The next prompt that fits.

        Raises:
            UserError: no prompt of a whole pass fits.
        """
        for _ in range(len(self._rows)):
            prompt = self.prompt_at(self._position)
            self._position += 1
            if self._maker.fits(prompt):
                return prompt
            self.dropped += 1
            if self.dropped == 1:
                logger.warning(
                    "prompt %d has %d tokens, more than %s leaves room for: left out, as all that are too long "
                    "(counted as rollout/prompts_too_long)",
                    prompt.index, self._maker.length(prompt), self._maker.limit,
                )  # fmt: skip
        raise UserError(
            f"none of the {len(self._rows)} prompts has between 1 and {self._maker.longest} tokens "
            f"({self._maker.limit}): raise training.seq_len"
        )

    def prompt_at(self, index: int) -> Prompt:
        """The prompt at a position of the stream, without moving."""
        number, place = divmod(index, len(self._rows))
        return self._maker.make(self._rows[self._order_of(number)[place]], index)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, "dropped": self.dropped, "fingerprint": self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a saved position.

        Raises:
            UserError: the rows, the seed or the order are not those of the saved stream.
        """
        if state["fingerprint"] != self._fingerprint():
            raise UserError(
                "the training prompts are not those of the checkpoint (rollout.dataset, its held-out share, "
                "rollout.shuffle or training.seed changed): restore them, or start a new run from the exported weights"
            )
        self._position = int(state["position"])
        self.dropped = int(state["dropped"])

    def _order_of(self, number: int) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self._rows))
        if self._order[0] != number:
            # random() is the one method whose sequence Python promises to keep for a seed.
            generator = random.Random(f"{self._seed}/{number}")
            keys = [generator.random() for _ in self._rows]
            self._order = (number, sorted(range(len(keys)), key=keys.__getitem__))
        return self._order[1]

    def _fingerprint(self) -> str:
        if self._digest is None:
            digest = hashlib.blake2b(f"{self._seed}/{self._shuffle}/{len(self._rows)}".encode(), digest_size=16)
            for row in self._rows:
                digest.update(json.dumps(row, sort_keys=True, default=str).encode())
            self._digest = digest.hexdigest()
        return self._digest
