"""A trainer that publishes versions of a small real model, and an engine with its agent that receives them."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import secrets
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from tests.engines import vllm_forking
from tests.engines.models import END, FP32_TOLERANCE, randomize
from tests.engines.plugins import install
from tests.journals import deliveries_of, journal_of
from tests.patience import until
from tests.processes import Processes, started_by
from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.distributed.placement import unique_parameters
from torchtitan.inference.actor_client import TOKEN_VARIABLE
from torchtitan.inference.engines.registry import load_engine
from torchtitan.inference.engines.sidecar.foreign_engine import AdminClient
from torchtitan.inference.types import Completion, GenerateRequest, SamplingParameters
from torchtitan.weight_sync.facade import WeightSync
from torchtitan.weight_sync.wire.handshake import ACTOR, role_key

Answer = TypeVar("Answer")
# Of every agent and engine here, in TOKEN_VARIABLE.
TOKEN = secrets.token_urlsafe(16)
PROMPT = [2, 3, 12, 4, 5, 16, 7, 9]
APPLIED_SECONDS = 90.0
CALL_SECONDS = 60.0
START_SECONDS = 400.0
# A worker in the engine's own process, as on GPUs, rather than in one more that has to import everything again. (By its
# short name vLLM does not have it on CPUs, where it would bind threads to cores.)
ONE_PROCESS = ("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor")


class Trainer:
    """Publishes the weights of a transformers model; version n has those of seed n. One rank, this process."""

    def __init__(self, folder: Path, model: Path, dtype: str = "float32", **changes: Any):
        import transformers

        # As in life, no two trainers have the same epoch: versions of one are none of another.
        self.folder, self.epoch, self.token = folder, f"e1-{secrets.token_hex(4)}", secrets.token_urlsafe(16)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        # Small enough for a version of several buckets.
        config = WeightSyncConfig()
        vars(config).update({"bucket_bytes": 256 * 1024, **changes})
        parameters = unique_parameters(dict(self.model.named_parameters()))
        self.sync = WeightSync(config, parameters, epoch=self.epoch, token=self.token, run_dir=folder, dtype=dtype)
        self.version, self._dtype = -1, getattr(torch, dtype)

    def publish(self) -> int:
        """The next version; returns its number."""
        no = not self.sync.reserve()
        self.sync.fence()
        self.version += 1
        self.change(self.version)
        assert self.sync.commit(self.version, int(no)) == "published"
        self.sync.fence()
        return self.version

    def change(self, version: int) -> None:
        """To the weights of that version."""
        randomize(self.model, version)

    def bring(self, versions: int = 1) -> None:
        """Publish so many, each once the one before is served."""
        for _ in range(versions):
            self.publish()
            self.wait_applied()

    def wait_applied(self, seconds: float = APPLIED_SECONDS) -> None:
        """Until the one actor serves the newest version."""
        outcome = self.sync.wait_until_applied(self.version, seconds, at_least=1)
        assert outcome.applied, f"version {self.version}: {outcome.missing}\n{self.journal_tail()}"

    def wait_for(self, condition: Callable[[], bool], seconds: float = APPLIED_SECONDS) -> None:
        """Until condition() holds."""
        until(condition, seconds, why=lambda: f"waited {seconds:g} s; {self.sync.actors()}\n{self.journal_tail()}")

    def journal(self, event: str, at_least: int = 0) -> list[dict[str, Any]]:
        """What the registry noted of that kind, once there is so much."""
        return journal_of(self.folder, event, at_least)

    def deliveries(self, outcome: str, at_least: int = 0) -> list[dict[str, Any]]:
        """What the registry noted of deliveries that ended so, once there is so much."""
        return deliveries_of(self.folder, outcome, at_least)

    def journal_tail(self) -> str:
        path = self.folder / "weight_sync" / "registry.jsonl"
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


def holding_weights(process: psutil.Process) -> list[psutil.Process]:
    """The workers of a vLLM that it has started; where there is one, it may be inside the engine's process."""
    return started_by(process, "VLLM::Worker") or started_by(process, "VLLM::EngineCore")


class Actor:
    """An engine's server and its agent."""

    def __init__(self, processes: Processes, kind: str, name: str, port: int):
        self.processes, self.kind, self.name, self.url = processes, kind, name, f"http://127.0.0.1:{port}"
        self.agent = AdminClient(self.url, TOKEN)
        self.engine = AdminClient(self.health()["engine"]["url"], TOKEN)

    def health(self) -> dict[str, Any]:
        """What the agent says."""
        data = self.agent.call("GET", "/health", CALL_SECONDS)
        assert isinstance(data, dict)
        return data

    def connect(self, trainer: Trainer) -> None:
        """Pull weights from that trainer."""
        names = {"registry": trainer.sync.registry_address, "epoch": trainer.epoch, "actor": "actor-0"}
        body = {**names, "key": role_key(trainer.token, ACTOR, "actor-0")}
        self.agent.call("POST", "/weights/connect", CALL_SECONDS, body)

    def asking(self, ask: Callable[[Any], Awaitable[Answer]]) -> Answer:
        """What `ask` returns of a client of this actor, which knows where the engine is."""

        async def work() -> Answer:
            client = load_engine(self.kind).make_client(self.url, TOKEN)
            try:
                await client.health(CALL_SECONDS)
                return await ask(client)
            finally:
                await client.close()

        return asyncio.run(work())

    def generate(self, prompt: Sequence[int], tokens: int, **sampling: Any) -> list[Completion]:
        """Completions of one prompt; greedy unless said otherwise."""
        values = {"max_tokens": tokens, "temperature": 0.0, "stop_token_ids": [END], **sampling}
        request = GenerateRequest(secrets.token_hex(8), list(prompt), SamplingParameters(**values))
        return self.asking(lambda client: client.generate(request, CALL_SECONDS))

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of given tokens."""
        log_probs: list[float] = self.asking(lambda client: client.score(list(token_ids), CALL_SECONDS)).log_probs
        return log_probs

    def workers(self) -> list[psutil.Process]:
        """The processes of a vLLM that hold weights."""
        return holding_weights(psutil.Process(self.health()["pid"]))


def start_actor(
    processes: Processes,
    engine: str,
    python: Path,
    model: Path,
    *options: str,
    name: str = "agent",
    beside: Actor | None = None,
    **environment: str,
) -> Actor:
    """Start agent and engine, or an agent more for the engine of another. Options after `--` are the engine's own."""
    log = processes.log(f"{name}.engine")
    command: list[str | Path] = [
        sys.executable, "-m", "torchtitan.inference.engines.sidecar", "--engine", engine, "--name", name,
        "--python", python, "--model", model, "--token-env", TOKEN_VARIABLE, "--log-file", log,
        "--max-length", "256" if engine == "vllm" else "400", "--max-sequences", "16",
        "--startup-timeout", str(START_SECONDS),
    ]  # fmt: skip
    agent_options, arguments = options, ()
    if "--" in options:
        agent_options, arguments = options[: options.index("--")], options[options.index("--") + 1 :]
    if beside is not None:
        command += ["--url", beside.engine.url, "--engine-token-env", TOKEN_VARIABLE]
    elif engine == "vllm":
        command += ["--memory-gb", "0.25"]
        arguments = arguments if "--tensor-parallel-size" in agent_options else (*ONE_PROCESS, *arguments)
        plugins = processes.folder / f"{name}.plugins"
        environment["PYTHONPATH"] = install(plugins, vllm_forking.GROUP, vllm_forking.FUNCTION)
    command += [*agent_options, "--engine-arguments", json.dumps(list(arguments))]
    try:
        port = processes.start_server(name, command, START_SECONDS, **{TOKEN_VARIABLE: TOKEN}, **environment)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{log.read_text()[-6000:] if log.exists() else ''}") from error
    return Actor(processes, engine, name, port)


def differences(ours: Sequence[float], references: Sequence[float]) -> float:
    """The largest one."""
    assert len(ours) == len(references) > 0
    return max(abs(value - other) for value, other in zip(ours, references, strict=True))


def check_serves_newest(actor: Actor, trainer: Trainer) -> None:
    """Greedy tokens and all log-probs are those of transformers with the newest version's weights."""
    (completion,) = actor.generate(PROMPT, 24)
    assert completion.token_ids == trainer.greedy(PROMPT, 24)
    check_log_probs(actor, trainer, completion)


def check_log_probs(
    actor: Actor, trainer: Trainer, completion: Completion, tolerance: float = FP32_TOLERANCE
) -> list[float]:
    """Of a completion of PROMPT, and of the same tokens scored; returns what transformers says."""
    assert [(span.epoch, span.version) for span in completion.spans] == [(trainer.epoch, trainer.version)]
    ids = [*PROMPT, *completion.token_ids]
    expected = trainer.log_probs(ids)
    assert differences(completion.log_probs, expected[len(PROMPT) - 1 :]) < tolerance
    assert differences(actor.score(ids), expected) < tolerance
    return expected
