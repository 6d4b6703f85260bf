"""The embedded engine to the rest of a run: see engines/descriptor.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from torchtitan.config.job_config import JobConfig
from torchtitan.inference.actor_client import ActorClient
from torchtitan.inference.engines.descriptor import EngineDescriptor, Features, TeacherScores
from torchtitan.inference.engines.embedded import forking
from torchtitan.inference.engines.embedded.client import EmbeddedClient, read_samples, read_scores
from torchtitan.inference.placement import threads_per_actor
from torchtitan.inference.serving.command_line import shared_command
from torchtitan.inference.types import Completion, EngineCall, GenerateRequest, ScoredTokens
from torchtitan.utils.child_process import Starter, child_environment
from torchtitan.utils.machine import host_memory

PROGRAM = "torchtitan.inference.engines.embedded"


def cache_megabytes(config: JobConfig) -> int:
    """Return the limit in MiB of one actor's KV cache: all actors together may take half of the memory that is free
    now."""
    return max(1, host_memory().available // (2 * max(1, config.inference.num_actors)) // 2**20)


class Embedded(EngineDescriptor):
    """Part of this package, for first experiments on a CPU."""

    features = Features(
        sleeps=True,
        reports_experts=True,
        trainers_layers=True,
        two_sets=True,
        any_family=False,
    )
    documentation: ClassVar[dict[str, str]] = {
        "runs in": "a separate process",
        "its Python": "the trainer's",
        "more than one device per model": "no",
        "weights change while requests run": "yes",
        "adapters only (`lora.rank`)": "merged in the engine",
        "how its weights are verified": "its own digest",
        "sleep while the trainer trains (`sleep_level`)": "frees its KV cache; level 2: its weights too",
    }

    def problems(self, config: JobConfig, ranks: int) -> Iterator[tuple[str, str]]:
        if config.inference.sleep_level == 2 and config.lora.rank:
            text = "must be at most 1 with lora.rank > 0: 2 would drop the base weights, which are never sent"
            yield "inference.sleep_level", text

    def digest_problem(self, config: JobConfig) -> str:
        if config.lora.rank == 0:
            return ""
        return "actors merge adapters into their weights, which then differ from what was sent: use probe (or auto)"

    def command(self, config: JobConfig, port_file: Path, number: int) -> list[str]:
        inference = config.inference
        return [
            *shared_command(PROGRAM, config, port_file),
            "--cache-mb", str(cache_megabytes(config)),
            "--threads", str(threads_per_actor(inference)),
            "--verify-every", str(int(config.verification == "digest")),
            "--require-version",
            *(["--exact"] if inference.engine.exact else []),
        ]  # fmt: skip

    def prepare(self, config: JobConfig) -> None:
        if config.started_actors:
            forking.prepare(child_environment(threads_per_actor(config.inference), secrets=True))

    def starter(self, command: Sequence[str], environment: Mapping[str, str]) -> Starter | None:
        # Tests start other programs in its place.
        return forking.starter(environment) if command[2] == PROGRAM else None

    def release(self) -> None:
        forking.close()

    def make_client(self, url: str, token: str, experts: int = 0, vocabulary: int | None = None) -> ActorClient:
        return EmbeddedClient(url, token, experts, vocabulary)

    def completions(self, request: GenerateRequest, answer: bytes | memoryview) -> list[Completion]:
        return read_samples(answer)

    def scored(self, token_ids: list[int], answer: bytes | memoryview) -> ScoredTokens:
        scores = read_scores(answer)
        return ScoredTokens(scores.log_probs, scores.epoch, scores.version)

    def ask_teacher(self, token_ids: list[int], top: int) -> EngineCall:
        return EngineCall("/v1/score", {"token_ids": token_ids, "top": top})

    def taught(self, token_ids: list[int], top: int, answer: bytes | memoryview) -> TeacherScores:
        scores = read_scores(answer)
        likeliest = [list(zip(log_probs, ids, strict=True)) for ids, log_probs in scores.top or []]
        return TeacherScores([*scores.log_probs], [[*row] for row in likeliest])


DESCRIPTOR = Embedded
