"""The endless stream of prompts over a source's rows, which can resume at any position."""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan.errors import UserError
from torchtitan.rollout.data.prompts import PromptMaker, none_fits
from torchtitan.rollout.data.rows import described
from torchtitan.rollout.types import Prompt

logger = logging.getLogger(__name__)


class PromptStream:
    """Endless stream of prompts over `rows`, reshuffled in every pass from `seed`.

    Prompt.index is the position in the stream. A row that is too long is skipped but keeps its position, so that an
    index means the same prompt whatever the length limits are.
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
        """Prompts skipped so far because they are too long"""

    @property
    def position(self) -> int:
        """The number of prompts drawn or skipped so far."""
        return self._position

    def next(self) -> Prompt:
        """Return the next prompt that fits.

        Raises:
            UserError: no prompt of a whole pass fits.
        """
        # All that is left of this pass, and a whole one: rows of two passes together need not be all of them.
        for _ in range(-self._position % len(self._rows) + len(self._rows)):
            prompt = self.prompt_at(self._position)
            self._position += 1
            if self._maker.fits(prompt):
                return prompt
            self._leave_out(prompt)
        raise self._none_fits()

    def prompt_at(self, index: int) -> Prompt:
        """Return the prompt at a position of the stream, without advancing it."""
        number, place = divmod(index, len(self._rows))
        return self._maker.make(self._rows[self._order_of(number)[place]], index)

    def replaced(self, index: int, row: int) -> bool:
        """Return whether a position has the prompt of another row by now."""
        return False

    def note(self, index: int, rewards: Sequence[float]) -> None:
        """Take in the rewards of the group of a position; a curriculum learns from them."""

    def consumed(self, last: int) -> None:
        """Note that a batch has been handed out whose last group has this position."""

    def figures(self) -> dict[str, float]:
        """Return metrics for metrics.jsonl."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, "dropped": self.dropped, "fingerprint": self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position.

        Raises:
            UserError: the rows, the seed or their order differ from those of the saved stream.
        """
        if state["fingerprint"] != self._fingerprint():
            raise UserError(
                "the training prompts are not those of the checkpoint (rollout.dataset, its held-out share, "
                "training.seed or rollout.sampler changed): restore them, or start a new run from "
                "the exported weights"
            )
        self._position = int(state["position"])
        self.dropped = int(state["dropped"])

    def _leave_out(self, prompt: Prompt) -> None:
        self.dropped += 1
        if self.dropped == 1:
            logger.warning(
                "prompt %d has %d tokens, too many for %s: this and other prompts that are too long are left out "
                "(counted as rollout/prompts_too_long)",
                prompt.index, self._maker.length(prompt), self._maker.limit,
            )  # fmt: skip

    def _none_fits(self) -> UserError:
        return none_fits(f"{len(self._rows)} prompts", self._maker)

    def _order_of(self, number: int) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self._rows))
        if self._order[0] != number:
            # random() is the only method for which Python guarantees the same sequence for a seed.
            generator = random.Random(f"{self._seed}/{number}")
            keys = [generator.random() for _ in self._rows]
            self._order = (number, sorted(range(len(keys)), key=keys.__getitem__))
        return self._order[1]

    def _fingerprint(self) -> str:
        if self._digest is None:
            digest = hashlib.blake2b(f"{self._seed}/{self._shuffle}/{len(self._rows)}".encode(), digest_size=16)
            for row in self._rows:
                digest.update(json.dumps(row, sort_keys=True, default=described).encode())
            self._digest = digest.hexdigest()
        return self._digest


def load_streams(state: Mapping[str, Any], streams: Mapping[str, PromptStream]) -> None:
    """Continue all streams of a run, by the names of their sources. Raises UserError if the sources, their rows or the
    seed are not those of the state."""
    # Before there were sources, a run had one stream.
    saved = state["streams"] if "streams" in state else {"": state["stream"]}
    if list(saved) != list(streams):
        raise UserError(
            f"the sources are not those of the checkpoint ({', '.join(saved) or 'one without a name'}): restore them "
            "and their order, or start a new run from the exported weights"
        )
    for name, stream in streams.items():
        stream.load_state_dict(saved[name])
