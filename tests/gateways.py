"""A gateway with everything behind it: a trainer that publishes, a pool of actors, and agents' clients."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.chat_models import QUESTION, SAID, TOOLS, WEATHER
from tests.engines.job import Trainer
from tests.patience import PATIENCE_S, eventually
from torchtitan.config.job_config import JobConfig
from torchtitan.inference.pool.actor_pool import InferencePool
from torchtitan.inference.types import Branch, SamplingParameters
from torchtitan.rollout.gateway.gateway_process import Gateway, SessionAccess
from torchtitan.utils.json_lines import EventLog, read_json_lines

MAX_CALLS = 16


class ChangingTrainer(Trainer):
    """Version 0 has the checkpoint's weights; each later one a little more of something else."""

    @torch.no_grad()
    def change(self, version: int) -> None:
        if version:
            generator = torch.Generator().manual_seed(version)
            for parameter in self.model.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))


@dataclass
class Behind:
    """What is behind a gateway."""

    gateway: Gateway
    pool: InferencePool
    trainer: ChangingTrainer
    run_dir: Path
    sampling: SamplingParameters
    config: JobConfig

    async def open(
        self, name: str, seed: int = 1, shares: str = "", many: bool = False, **sampling: Any
    ) -> SessionAccess:
        """A session, whose sampling is the run's or as it is said."""
        params = replace(self.sampling, seed=seed, **sampling)
        return await self.gateway.open(name, params, shares=shares, many=many)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_json_lines(self.run_dir / "events.jsonl") if event["kind"] == kind]

    def sampled(self, record: Path) -> list[tuple[list[int], list[int]]]:
        """(prompt, tokens) of all that recording actors have sampled."""
        lines = [json.loads(line) for line in record.read_text().splitlines()]
        return [(prompt, completion["token_ids"]) for _, prompt, completion in lines]


def make_config(model: Path, **inference: Any) -> JobConfig:
    config = JobConfig()
    config.model.hf_assets_path = str(model)
    config.training.seq_len, config.rollout.max_completion_tokens = 1024, 96
    config.environment.max_turns = MAX_CALLS
    config.inference.threads_per_actor, config.inference.num_actors = 1, 1
    config.inference.health_timeout_s = 2.0
    vars(config.inference).update(inference)
    return config


@contextlib.asynccontextmanager
async def playing(config: JobConfig, run_dir: Path, eos: int) -> AsyncIterator[Behind]:
    """Everything, with version 0 published."""
    os.makedirs(run_dir / "logs")
    trainer = ChangingTrainer(run_dir, Path(config.model.hf_assets_path))
    events = EventLog(run_dir / "events.jsonl")
    pool = InferencePool(config, trainer.epoch, trainer.token, run_dir, events)
    gateway = Gateway(config, pool, events, run_dir)
    try:
        await pool.start()
        await pool.connect_weights(trainer.sync.registry_address)
        trainer.publish()
        # So that no deadline of a call is one of the engine's start, too.
        start_s = config.inference.startup_timeout_s
        await eventually(lambda: "ready" in pool.actors.values(), start_s, why=lambda: f"no actor: {pool.actors}")
        rollout = config.rollout
        sampling = SamplingParameters(
            rollout.max_completion_tokens, temperature=rollout.temperature, stop_token_ids=[eos]
        )
        yield Behind(gateway, pool, trainer, run_dir, sampling, config)
    finally:
        await gateway.close()
        await pool.close()
        trainer.close()


def client(access: SessionAccess) -> Any:
    """OpenAI's, as an agent makes it."""
    import openai

    return openai.AsyncOpenAI(base_url=access.base_url, api_key=access.key, max_retries=0, timeout=PATIENCE_S)


async def play_both_ways(behind: Behind) -> AsyncIterator[Branch]:
    """The conversation with tools, whole and streamed: what the gateway has recorded of each."""
    for stream in (False, True):
        access = await behind.open(f"tools-{stream}", temperature=0.0)
        messages = await play_with_tools(access, stream)
        assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
        assert messages[-1]["content"] == SAID[1]
        played = await behind.gateway.end(access.session)
        (branch,) = played.branches
        assert (played.calls, played.failed, played.truncated) == (2, 0, False)
        spans = {(span.epoch, span.version) for segment in branch.sampled for span in segment.spans}
        assert spans == {(behind.trainer.epoch, 0)}
        yield branch


async def play_with_tools(access: SessionAccess, stream: bool) -> list[dict[str, Any]]:
    """The loop of every agent: call tools until the policy has said its last."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    async with client(access) as api:
        while True:
            arguments: dict[str, Any] = {"model": "chat", "messages": messages, "tools": TOOLS}
            if stream:
                async with api.chat.completions.stream(**arguments) as events:
                    async for _ in events:
                        pass
                    choice = (await events.get_final_completion()).choices[0]
            else:
                choice = (await api.chat.completions.create(**arguments)).choices[0]
            message = choice.message.model_dump()
            message.pop("parsed", None)
            messages.append(message)
            if choice.finish_reason != "tool_calls":
                return messages
            for call in choice.message.tool_calls:
                assert json.loads(call.function.arguments) == {"city": "Rome"} and call.function.name == "weather"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": WEATHER})
