"""vLLM to the rest of a run: see engines/descriptor.py."""

from __future__ import annotations

import msgspec

from torchtitan.inference.engines.descriptor import TeacherScores
from torchtitan.inference.engines.sidecar.descriptor import ServedEngine
from torchtitan.inference.engines.vllm.engine import ENGINE, Row
from torchtitan.inference.types import Call
from torchtitan.utils.typed_json import decode


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[str, Row] | None]


class _TeacherAnswer(msgspec.Struct):
    choices: list[_Choice]


class VLLMServer(ServedEngine):
    """vLLM's server with an agent beside it."""

    foreign = ENGINE

    def ask_teacher(self, token_ids: list[int], top: int) -> Call:
        """A server that others have started has this route, and perhaps not that of engine.py."""
        body = {"prompt": token_ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top}
        return Call("/v1/completions", body)

    def taught(self, token_ids: list[int], top: int, answer: bytes | memoryview) -> TeacherScores:
        (choice, *_) = decode(_TeacherAnswer, answer, len(answer)).choices
        rows = [row or {} for row in choice.prompt_logprobs[1:]]
        log_probs = [row[str(token)].logprob for row, token in zip(rows, token_ids[1:], strict=True)]
        if not top:
            return TeacherScores([*log_probs], [])
        # The token that is there comes too, whether or not it is among the likeliest.
        likeliest = [[(value.logprob, int(token)) for token, value in row.items()] for row in rows]
        return TeacherScores([*log_probs], [[*row] for row in likeliest])


DESCRIPTOR = VLLMServer
