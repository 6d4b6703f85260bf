"""A trainer that publishes versions of a small real model, and a vLLM server with its agent that receives them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from tests.engines.models import END, randomize
from tests.engines.processes import Processes
from tests.journals import journal_of
from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.inference.agent.client import AgentClient
from torchtitan.inference.agent.control import AdminClient
from torchtitan.inference.types import Completion, GenerateRequest, SamplingParameters
from torchtitan.inference.vllm.dialect import DIALECT
from torchtitan.weight_sync.facade import WeightSync
from torchtitan.weight_sync.parameters import unique_parameters

Answer = TypeVar("Answer")
TOKEN_ENV = "TORCHTITAN_TEST_TOKEN"
APPLIED_SECONDS = 90.0
CALL_SECONDS = 60.0


class Trainer:
    """Publishes the weights of a transformers model; version n has those of seed n. One rank, this process."""

    def __init__(self, folder: Path, model: Path, dtype: str = "float32", **changes: Any):
        import transformers

        # As in life, no two trainers have the same epoch: versions of one are none of another.
        self.folder, self.epoch, self.token = folder, f"e1-{secrets.token_hex(4)}", secrets.token_urlsafe(16)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        # Small enough for a version of several buckets.
        values = {"bucket_bytes": 256 * 1024, "offer_timeout_s": 5.0, "progress_timeout_s": 5.0, **changes}
        parameters = unique_parameters(dict(self.model.named_parameters()))
        self.sync = WeightSync(
            WeightSyncConfig(**values), parameters, epoch=self.epoch, token=self.token, run_dir=folder, dtype=dtype
        )
        self.version, self._dtype = -1, getattr(torch, dtype)

    def publish(self) -> int:
        """The next version; returns its number."""
        no = not self.sync.reserve()
        self.sync.fence()
        self.version += 1
        randomize(self.model, self.version)
        assert self.sync.commit(self.version, int(no)) == "published"
        self.sync.fence()
        return self.version

    def wait_applied(self, seconds: float = APPLIED_SECONDS) -> None:
        """Until the one actor serves the newest version."""
        outcome = self.sync.wait_until_applied(self.version, seconds, at_least=1)
        assert outcome.applied, f"version {self.version}: {outcome.missing}\n{self.journal_tail()}"

    def wait_for(self, condition: Callable[[], bool], seconds: float = APPLIED_SECONDS) -> None:
        """Until condition() holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds:g} s; {self.sync.actors()}\n{self.journal_tail()}"
            time.sleep(0.02)

    def journal(self, event: str, at_least: int = 0) -> list[dict[str, Any]]:
        """What the coordinator noted of that kind, once there is so much."""
        return journal_of(self.folder, event, at_least)

    def journal_tail(self) -> str:
        path = self.folder / "weight_sync" / "coordinator.jsonl"
        return path.read_text()[-3000:] if path.exists() else ""

    @torch.no_grad()
    def log_probs(self, token_ids: Sequence[int], version: int | None = None) -> list[float]:
        """What transformers says of every token but the first, computed in the dtype in which the actor computes."""
        logits = self.logits(token_ids, version)[:-1]
        return logits.log_softmax(-1).gather(1, torch.tensor(list(token_ids))[1:, None])[:, 0].tolist()

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int], version: int | None = None) -> torch.Tensor:
        """[tokens, vocabulary] after every token."""
        logits: torch.Tensor = self._policy(version)(torch.tensor([list(token_ids)])).logits[0].float()
        return logits

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """The most likely continuation of the newest version, up to and with the end token."""
        policy, ids = self._policy(None), list(prompt)
        for _ in range(tokens):
            ids.append(int(policy(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == END:
                break
        return ids[len(prompt) :]

    def _policy(self, version: int | None) -> torch.nn.Module:
        import copy

        policy = copy.deepcopy(self.model)
        if version is not None:
            randomize(policy, version)
        return policy.to(self._dtype)

    def close(self) -> None:
        self.sync.close()


@contextlib.contextmanager
def training(folder: Path, model: Path, **options: Any) -> Iterator[Trainer]:
    """A Trainer that is closed in the end."""
    trainer = Trainer(folder, model, **options)
    try:
        yield trainer
    finally:
        trainer.close()


def holding_weights(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """vLLM's workers; where there is one, it may be inside the engine's process."""
    named = {
        title: [p for p in processes if title in " ".join(p.cmdline())]
        for title in ("VLLM::Worker", "VLLM::EngineCore")
    }
    return named["VLLM::Worker"] or named["VLLM::EngineCore"]


class Actor:
    """A vLLM server and its agent."""

    def __init__(self, processes: Processes, name: str, port: int, token: str):
        self.processes, self.name, self.url, self.token = processes, name, f"http://127.0.0.1:{port}", token
        self.agent = AdminClient(self.url, token)
        self.engine = AdminClient(self.health()["engine"]["url"], token)

    def health(self) -> dict[str, Any]:
        """What the agent says."""
        data = self.agent.call("GET", "/health", CALL_SECONDS)
        assert isinstance(data, dict)
        return data

    def connect(self, trainer: Trainer, name: str = "actor-0") -> None:
        """Receive weights from that trainer."""
        body = {
            "coordinator": trainer.sync.coordinator_address,
            "actor": name,
            "epoch": trainer.epoch,
            "token": trainer.token,
        }
        self.agent.call("POST", "/weights/connect", CALL_SECONDS, body)

    def asking(self, ask: Callable[[AgentClient], Awaitable[Answer]]) -> Answer:
        """What `ask` returns of a handler of this actor."""

        async def work() -> Answer:
            handler = AgentClient(DIALECT, self.url, self.token)
            try:
                await handler.health(CALL_SECONDS)
                return await ask(handler)
            finally:
                await handler.close()

        return asyncio.run(work())

    def generate(self, prompt: Sequence[int], tokens: int, **sampling: Any) -> list[Completion]:
        """Completions of one prompt; greedy unless said otherwise."""
        values = {"max_tokens": tokens, "temperature": 0.0, "stop_token_ids": [END], **sampling}
        request = GenerateRequest(secrets.token_hex(8), list(prompt), SamplingParameters(**values))
        return self.asking(lambda handler: handler.generate(request, CALL_SECONDS))

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of given tokens."""
        return self.asking(lambda handler: handler.score(list(token_ids), CALL_SECONDS)).log_probs

    def workers(self) -> list[psutil.Process]:
        """The engine's processes that hold weights."""
        agent = psutil.Process(self.health()["pid"])
        return holding_weights(agent.children(recursive=True))

    def freeze(self) -> None:
        """Stop the process that receives weights."""
        self.workers()[0].send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.workers()[0].send_signal(signal.SIGCONT)


def start_actor(
    processes: Processes, python: Path, model: Path, *options: str, name: str = "agent", **environment: str
) -> Actor:
    """Start agent and engine; options after `--` are vLLM's own."""
    token = secrets.token_urlsafe(16)
    command: list[str | Path] = [
        sys.executable, "-m", "torchtitan.inference.agent", "--engine", "vllm", "--route", "direct",
        "--python", python, "--model", model, "--token-env", TOKEN_ENV, "--log-file", processes.log(f"{name}.engine"),
        "--max-length", "256", "--max-sequences", "16", "--memory-gb", "0.25",
    ]  # fmt: skip
    ours, theirs = options, ()
    if "--" in options:
        ours, theirs = options[: options.index("--")], options[options.index("--") + 1 :]
    command += [*ours, "--engine-arguments", json.dumps(list(theirs))]
    try:
        port = processes.start_server(name, command, 300.0, **{TOKEN_ENV: token}, **environment)
    except AssertionError as error:
        log = processes.log(f"{name}.engine")
        raise AssertionError(f"{error}\n{log.read_text()[-6000:] if log.exists() else ''}") from error
    return Actor(processes, name, port, token)
