"""An embedded engine as a run sees it: the command line that starts it, and the client of its server."""

from __future__ import annotations

from pathlib import Path

import psutil

from torchtitan.config.derived import verification
from torchtitan.config.job_config import JobConfig
from torchtitan.inference.actor_main import shared_command
from torchtitan.inference.client import ActorClient, ActorError, Capabilities, ScoredTokens, check_completions
from torchtitan.inference.placement import actor_cores, threads_per_actor
from torchtitan.inference.types import Completion, GenerateRequest


def cache_megabytes(config: JobConfig) -> int:
    """Upper bound of one actor's KV cache: together they may take half of the memory that is free now."""
    return max(1, psutil.virtual_memory().available // (2 * max(1, config.inference.num_actors)) // 2**20)


def embedded_command(config: JobConfig, port_file: Path, number: int = 0) -> list[str]:
    """The command line of embedded actor `number`, which reports its port in `port_file` and serves nothing before it
    got its first weights version. Raises UserError where its cores are not there."""
    inference = config.inference
    command = [
        *shared_command("torchtitan.inference.embedded", config, port_file),
        "--cache-mb", str(cache_megabytes(config)),
        "--threads", str(threads_per_actor(inference)),
        "--verify-every", str(config.weight_sync.verify_every if verification(config) == "digest" else 0),
        "--require-version",
    ]  # fmt: skip
    if inference.pin_cores:
        command += ["--cores", ",".join(map(str, actor_cores(inference, number)))]
    return [*command, "--exact"] if inference.exact else command


class EmbeddedClient(ActorClient):
    """Talks to the embedded engine's server, which does everything at one address."""

    async def generate(self, request: GenerateRequest, timeout_s: float) -> list[Completion]:
        """Completions of one request.

        Raises:
            ActorNotReady: the engine has no weights yet.
            RequestRefused: the request itself is wrong.
            ActorError: no answer, an error, or an answer that is not well-formed.
        """
        data = await self.client.call_object("generate", "POST", "/v1/generate", timeout_s, request.to_json())
        try:
            completions = [Completion.from_json(item) for item in data["completions"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ActorError("generate", f"the answer is malformed: {error!r}") from error
        return check_completions(completions, request.sampling.n)

    async def score(self, token_ids: list[int], timeout_s: float) -> ScoredTokens:
        data = await self.client.call_object("score", "POST", "/v1/score", timeout_s, {"token_ids": token_ids})
        try:
            return ScoredTokens([float(value) for value in data["log_probs"]], str(data["epoch"]), int(data["version"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ActorError("score", f"the answer is malformed: {error!r}") from error

    async def capabilities(self, timeout_s: float) -> Capabilities:
        data = await self.state(timeout_s)
        return Capabilities(
            "embedded", score=True, kept_tokens=True, digest=bool(data.get("verifies", False)), sleep=True
        )
