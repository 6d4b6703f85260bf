"""The recording actor, whose policy says what a script says: a token is sampled and then replaced by the script's, with
the log-prob that the weights give it.

SCRIPT names a JSON file with [[text, turns], …]: a conversation whose prompt holds the text gets these turns, one after
the other, and the last of them from then on.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tests.chat_models import END
from tests.integration_tests import recording_actor
from torchtitan.inference.engines.embedded.__main__ import main
from torchtitan.inference.engines.embedded.engine import Engine
from torchtitan.inference.engines.embedded.forwards import SampledTokens
from torchtitan.inference.engines.embedded.server import EngineServer
from torchtitan.rollout.conversation.tokenizer import Tokenizer

SCRIPT = "TORCHTITAN_TEST_SCRIPT"
Sample = Callable[[torch.Tensor, np.ndarray], SampledTokens]
_make_sampler = Engine._make_sampler


class Script:
    """What the policy says."""

    def __init__(self, model: str):
        self._tokenizer = Tokenizer(model)
        self._parts = json.loads(Path(os.environ[SCRIPT]).read_text())
        self.turn = functools.cache(self._turn)

    def _turn(self, prompt_ids: tuple[int, ...]) -> list[int]:
        """The tokens of the turn behind a prompt."""
        prompt = self._tokenizer.decode(list(prompt_ids), skip_special=False)
        (turns,) = (turns for text, turns in self._parts if text in prompt)
        answered = prompt.count("<|im_start|>assistant\n") - 1
        return [*self._tokenizer.encode(turns[min(answered, len(turns) - 1)]), END]


def scripted(script: Script) -> Callable[[Engine, int], Sample]:
    """In place of Engine._make_sampler."""

    def make_sampler(engine: Engine, first: int) -> Sample:
        sampler = _make_sampler(engine, first)
        turns = [script.turn(tuple(sequence.owner.request.prompt_ids)) for sequence in engine._rows.sequences[first:]]

        def sample(logits: torch.Tensor, places: np.ndarray) -> SampledTokens:
            sampler(logits, places)
            tokens = torch.tensor([turn[place] for turn, place in zip(turns, places.tolist(), strict=True)])
            log_probs = logits.log_softmax(-1).gather(-1, tokens[:, None])
            return SampledTokens(tokens.numpy(), log_probs.squeeze(-1).numpy(), None)

        return sample

    return make_sampler


if __name__ == "__main__":
    EngineServer._run = recording_actor._recorded  # type: ignore[method-assign]
    model = sys.argv[sys.argv.index("--model") + 1]
    Engine._make_sampler = scripted(Script(model))  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:]))
