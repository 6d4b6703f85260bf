"""vLLM to the rest of a run: see engines/descriptor.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import msgspec

from torchtitan.config.job_config import JobConfig
from torchtitan.config.values import option_name
from torchtitan.errors import UserError
from torchtitan.inference.engines.descriptor import Features, TeacherScores
from torchtitan.inference.engines.sidecar.descriptor import ServedEngine
from torchtitan.inference.engines.vllm.engine import ENGINE, Row
from torchtitan.inference.types import EngineCall
from torchtitan.models.shape.checkpoint_shape import read_shape
from torchtitan.utils.machine import wheel_version
from torchtitan.utils.typed_json import decode

NEEDS_TORCHVISION = "qwen3_5"
# vLLM's option, and its short name.
QUANTIZATION = {"quantization", "q"}


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[str, Row] | None]


class _TeacherAnswer(msgspec.Struct):
    choices: list[_Choice]


class VLLMServer(ServedEngine):
    """vLLM's server with an agent beside it."""

    foreign = ENGINE
    features = Features(
        sleeps=True,
        reports_experts=True,
        reports_experts_on_cpu=False,
    )
    documentation: ClassVar[dict[str, str]] = {
        "runs in": "vLLM's server, with our agent beside it",
        "its Python": "a separate environment",
        "more than one device per model": "`tensor_parallel_size`",
        "weights change while requests run": "yes",
        "adapters only (`lora.rank`)": "merged beside its base weights",
        "how its weights are verified": "probe, or its own digest",
        "sleep while the trainer trains (`sleep_level`)": "`/sleep` and `/wake_up`",
    }

    def missing(self, config: JobConfig) -> Iterator[tuple[str, str]]:
        try:
            args = read_shape(config)
        except UserError:  # preflight reports it
            return
        python = self.python(config)
        if python is None or (args.composite is None and not args.family.startswith(NEEDS_TORCHVISION)):
            return
        if wheel_version(python, "torchvision") is None:
            family = args.family if args.composite is None else args.composite.family
            text = f"imports torchvision for {family}, which {python} lacks"
            yield "inference.backend", f"{text}: install the one that fits its torch there"

    def digest_problem(self, config: JobConfig) -> str:
        if config.inference.engine.route == "agent" or config.lora.rank:
            return super().digest_problem(config)
        try:
            unseen = "the experts of a mixture" if read_shape(config).experts is not None else ""
        except UserError:  # preflight reports it
            return ""
        options = {option_name(key) for key, value in config.inference.engine.args.items() if value}
        if not options.isdisjoint(QUANTIZATION):
            unseen = "quantised weights"
        # live_check.py compares linear layers that compute with a checkpoint's own numbers.
        return f"vLLM's digest does not look at {unseen}: use probe (or auto)" if unseen else ""

    def ask_teacher(self, token_ids: list[int], top: int) -> EngineCall:
        """A server that others have started has this route, and perhaps not that of engine.py."""
        body = {"prompt": token_ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top}
        return EngineCall("/v1/completions", body)

    def taught(self, token_ids: list[int], top: int, answer: bytes | memoryview) -> TeacherScores:
        (choice, *_) = decode(_TeacherAnswer, answer, len(answer)).choices
        rows = [row or {} for row in choice.prompt_logprobs[1:]]
        log_probs = [row[str(token)].logprob for row, token in zip(rows, token_ids[1:], strict=True)]
        if not top:
            return TeacherScores([*log_probs], [])
        # The token that is there comes too, whether or not it is among the likeliest.
        return TeacherScores([*log_probs], [_likeliest(row) for row in rows])


def _likeliest(row: Mapping[str, Row]) -> list[tuple[float | None, int | None]]:
    return [(value.logprob, int(token)) for token, value in row.items()]


DESCRIPTOR = VLLMServer
