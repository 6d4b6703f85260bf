"""SGLang to the rest of a run: see engines/descriptor.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from torchtitan.config.job_config import JobConfig
from torchtitan.inference.engines.descriptor import Features, TeacherScores
from torchtitan.inference.engines.sglang.engine import ENGINE, SampledSequence, TokenLogProb
from torchtitan.inference.engines.sidecar.descriptor import ServedEngine
from torchtitan.inference.placement import EngineMemory
from torchtitan.inference.types import EngineCall
from torchtitan.utils.typed_json import decode


class SGLangServer(ServedEngine):
    """SGLang's server with an agent beside it."""

    foreign = ENGINE
    features = Features(
        # Its pause either stops immediately or drops running requests.
        update_modes=("in_flight",),
        sleeps=True,
        reports_experts=True,
    )
    documentation: ClassVar[dict[str, str]] = {
        "runs in": "SGLang's server, with our agent beside it",
        "its Python": "a separate environment",
        "more than one device per model": "`tensor_parallel_size`",
        "weights change while requests run": "yes",
        "adapters only (`lora.rank`)": "merged beside its base weights",
        "how its weights are verified": "probe",
        "sleep while the trainer trains (`sleep_level`)": "releases and resumes memory by tags",
    }

    def problems(self, config: JobConfig, ranks: int) -> Iterator[tuple[str, str]]:
        yield from super().problems(config, ranks)
        if config.grpo.routing_replay and config.inference.in_flight_kv == "recompute":
            text = "needs inference.in_flight_kv = keep with inference.backend = sglang"
            why = (
                "for recomputed tokens it would report the experts of the new weights but the log-probs of the old ones"
            )
            yield "grpo.routing_replay", f"{text}: {why}"

    def memory_share(self, memory: EngineMemory, device_bytes: int) -> float:
        """Its share (--mem-fraction-static) is of weights and KV cache alone."""
        return memory.utilization(device_bytes, static=True)

    def ask_teacher(self, token_ids: list[int], top: int) -> EngineCall:
        call = self.foreign.score(token_ids)
        return EngineCall(call.path, {**call.body, "top_logprobs_num": top}) if top else call

    def taught(self, token_ids: list[int], top: int, answer: bytes | memoryview) -> TeacherScores:
        about = decode(SampledSequence, answer, len(answer)).meta_info
        log_probs = [row.logprob for row in about.input_token_logprobs[1:]]
        rows = (about.input_top_logprobs or [])[1:] if top else []
        return TeacherScores(log_probs, [_likeliest(row or []) for row in rows])


def _likeliest(row: Sequence[TokenLogProb]) -> list[tuple[float | None, int | None]]:
    return [(entry.logprob, entry.token_id) for entry in row]


DESCRIPTOR = SGLangServer
