"""Whether the gateway can run in the trainer's process: what both places cost a training thread.

    python benchmarks/gateway_process.py --json

64 agents in a process of their own have conversations through the gateway, with answers from a stand-in for the engines
that takes 1/200 s a token, while the main thread trains a small Qwen3. The gateway is (process) the process that a run
starts, or (thread) the same server in an asyncio loop in a thread of the trainer's process, where rollouts already are,
called without JSON in between; or (alone) there is nothing but training. The main thread has a core, and all else the
other. The three take turns. Times of the main thread are without its waits for its core, as the kernel counts them.

The gateway stays a process: in the thread, a step takes 6 % longer than with the process, because its Python needs the
interpreter's lock, and answers come no faster.

    step_process, step_thread       time of a training step ÷ alone, median over turns
    thread_vs_process               time of a step with the thread ÷ with the process, median over turns
    rate_process, rate_thread       sampled tokens per second and session, of 200 that the engines give
    load_process, load_thread       seconds of processor time per second that the rollouts' thread in the trainer's
                                    process takes, with or without the gateway in it
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import asyncio
import json
import secrets
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

import aiohttp  # noqa: E402
import torch  # noqa: E402

from benchmarks import common  # noqa: E402
from tests.chat_models import VOCABULARY, write_chat_tokenizer  # noqa: E402
from torchtitan.config.job_config import JobConfig  # noqa: E402
from torchtitan.inference.types import Completion, GenerateRequest, SamplingParameters, VersionSpan  # noqa: E402
from torchtitan.models.decoder import Decoder  # noqa: E402
from torchtitan.models.hf_checkpoint import export_policy  # noqa: E402
from torchtitan.models.layers.attention import PackedLayout  # noqa: E402
from torchtitan.models.shape.model_args import ModelArgs  # noqa: E402
from torchtitan.rollout.flow.rollouts import BackgroundLoop  # noqa: E402
from torchtitan.rollout.gateway.gateway_process import Gateway  # noqa: E402
from torchtitan.rollout.gateway.server import GatewayServer  # noqa: E402
from torchtitan.utils.json_lines import EventLog  # noqa: E402

SESSIONS, RATE, TURNS, SAMPLED, OBSERVED = 64, 200.0, 4, 128, 64
PROMPT, LENGTH = 512, 4096
CONDITIONS = ("alone", "process", "thread")


class StandInEngines:
    """Answers with letters, at RATE tokens a second."""

    async def generate(self, request: GenerateRequest, _min_version: int = 0, shares: str = "") -> list[Completion]:
        count = request.sampling.max_tokens
        await asyncio.sleep(count / RATE)
        ids = [65 + (number * 7) % 26 for number in range(count)]
        return [Completion(ids, [-1.5] * count, "length", [VersionSpan("bench", 1, 0, count)])]


class _Direct:
    """Calls from the server to the run, without a connection."""

    def __init__(self, engines: StandInEngines):
        self._engines = engines

    async def call(self, _name: str, /, request: dict[str, Any], **_: Any) -> list[dict[str, Any]]:
        completions = await self._engines.generate(GenerateRequest.from_json(request))
        return [one.to_json() for one in completions]


class InThread:
    """The gateway's server in the loop that awaits its methods."""

    def __init__(self, settings: dict[str, Any], engines: StandInEngines):
        self._settings, self._engines = settings, engines

    async def start(self) -> None:
        self._server: Any = GatewayServer("")
        self._server._peer = _Direct(self._engines)
        await self._server._set_up(**self._settings)
        self._url = f"http://127.0.0.1:{await self._server.site.start('127.0.0.1', 0)}/v1"

    async def open(self, name: str, sampling: SamplingParameters) -> tuple[str, str]:
        return self._url, await self._server._open(name, False, asdict(sampling), 0, name)

    async def end(self, name: str) -> int:
        data = await self._server._end(name)
        return sum(len(one["token_ids"]) for branch in data["branches"] for one in branch if isinstance(one, dict))

    async def close(self) -> None:
        await self._server.site.close()


class InProcess:
    """The gateway as it is."""

    def __init__(self, gateway: Gateway):
        self._gateway = gateway

    async def open(self, name: str, sampling: SamplingParameters) -> tuple[str, str]:
        access = await self._gateway.open(name, sampling, shares=name)
        return access.base_url, access.key

    async def end(self, name: str) -> int:
        record = await self._gateway.end(name)
        return sum(len(one.token_ids) for branch in record.branches for one in branch.sampled)

    async def close(self) -> None:
        await self._gateway.close()


async def talk(http: aiohttp.ClientSession, url: str, key: str, delay: float, turns: int) -> float:
    """Return the seconds of a conversation."""
    await asyncio.sleep(delay)
    begun = time.perf_counter()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x" * PROMPT}]
    for turn in range(turns):
        body = {"model": "chat", "messages": messages, "max_tokens": SAMPLED}
        headers = {"Authorization": f"Bearer {key}"}
        async with http.post(f"{url}/chat/completions", json=body, headers=headers) as response:
            answer = await response.json()
            if response.status != 200:
                raise SystemExit(f"the gateway answered {response.status}: {answer}")
        messages += [answer["choices"][0]["message"], {"role": "user", "content": str(turn % 10) * OBSERVED}]
    return time.perf_counter() - begun


async def talk_all(accesses: list[tuple[str, str]], turns: int) -> float:
    """Return the seconds of all conversations. They begin one after the other, so that their calls do not coincide."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        step = SAMPLED / RATE / len(accesses)
        return sum(
            await asyncio.gather(*(talk(http, url, key, step * i, turns) for i, (url, key) in enumerate(accesses)))
        )


def be_agents() -> None:
    """The process of the agents: a line with their accesses, and an answer when they are done."""
    for line in sys.stdin:
        given = json.loads(line)
        common.say({"seconds": asyncio.run(talk_all(given["accesses"], given["turns"]))})


class Trainer:
    """A small policy, and the time of its steps."""

    def __init__(self, policy: Decoder):
        torch.set_num_threads(1)
        self._policy = policy
        self._optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5)
        self._ids = torch.randint(VOCABULARY, (256,))

    def step(self) -> float:
        """Return its seconds, without those in which the thread waited for its core."""
        begun, waited = time.perf_counter(), waited_for_core()
        self._optimizer.zero_grad()
        log_probs, _ = self._policy(self._ids, PackedLayout([128, 128]), self._ids.roll(-1), 1.0)
        (-log_probs.mean()).backward()
        torch.nn.utils.clip_grad_norm_(self._policy.parameters(), 1.0)
        self._optimizer.step()
        return time.perf_counter() - begun - (waited_for_core() - waited)


def waited_for_core() -> float:
    """Seconds that this thread could have run and did not."""
    schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text(encoding="ascii")
    return int(schedstat.split()[1]) / 1e9


def measure(folder: Path, sessions: int, turns: int, repeats: int) -> dict[str, float]:
    trainers, others = common.two_cores()
    args = ModelArgs("qwen3", VOCABULARY, 128, 256, 4, 4, 2, 32, max_position_embeddings=LENGTH)
    policy = Decoder(args)
    policy.initialize_weights(0)
    export_policy(policy, folder / "model")
    write_chat_tokenizer(folder / "model")
    config = JobConfig()
    config.model.hf_assets_path = str(folder / "model")
    config.training.seq_len, config.environment.max_turns = LENGTH, 64
    engines: Any = StandInEngines()
    gateway = Gateway(config, engines, EventLog(folder / "events.jsonl"), folder)
    with common.running_on(others):
        loop = BackgroundLoop("rollouts")
        agents = common.Child(Path(__file__), {})
    places: dict[str, InProcess | InThread] = {"process": InProcess(gateway)}
    (folder / "logs").mkdir()
    places["thread"] = thread = InThread(gateway._settings, engines)
    loop.call(thread.start)
    trainer = Trainer(policy)
    steps: dict[str, list[float]] = {name: [] for name in CONDITIONS}
    rates: dict[str, list[float]] = {"process": [], "thread": []}
    loads: dict[str, list[float]] = {"process": [], "thread": []}

    def turn(condition: str, number: int) -> float:
        names = [f"{condition}-{number}-{secrets.token_hex(3)}-{i}" for i in range(sessions)]
        times = list[float]()
        if condition == "alone":
            end = time.perf_counter() + turns * SAMPLED / RATE
            while time.perf_counter() < end:
                times.append(trainer.step())
            return statistics.fmean(times)
        place = places[condition]
        sampling = SamplingParameters(SAMPLED)
        accesses = [loop.call(place.open, name, sampling) for name in names]
        done = loop.submit(asyncio.to_thread, _told, agents, {"accesses": accesses, "turns": turns})
        begun, used = time.perf_counter(), loop.call(time.thread_time)
        while not done.done():
            times.append(trainer.step())
        loads[condition].append((loop.call(time.thread_time) - used) / (time.perf_counter() - begun))
        sampled = sum(loop.call(place.end, name) for name in names)
        rates[condition].append(sampled / done.result()["seconds"])
        return statistics.fmean(times)

    os.sched_setaffinity(0, {trainers})
    try:
        for number in range(-1, repeats):
            for condition in CONDITIONS[:: 1 if number % 2 else -1]:
                value = turn(condition, number)
                common.progress(f"{condition}: {1000 * value:.1f} ms a step")
                if number >= 0:
                    steps[condition].append(value)
    finally:
        agents.close()
        for place in places.values():
            loop.call(place.close)
        loop.close()
    return {
        "step_process": common.median_ratio(steps["process"], steps["alone"]),
        "step_thread": common.median_ratio(steps["thread"], steps["alone"]),
        "thread_vs_process": common.median_ratio(steps["thread"], steps["process"]),
        **{f"rate_{name}": statistics.median(rate) for name, rate in rates.items()},
        **{f"load_{name}": statistics.median(load) for name, load in loads.items()},
        "step_ms": 1000 * statistics.median(steps["alone"]),
    }


def _told(agents: common.Child, message: dict[str, Any]) -> dict[str, Any]:
    agents.tell(message)
    try:
        return agents.answer()
    except SystemExit as error:  # which would end the loop's thread, and leave its callers waiting
        raise RuntimeError(str(error)) from error


def main() -> None:
    if common.child_arguments() is not None:
        be_agents()
        return
    arguments = common.parser(__doc__).parse_args()
    sessions, turns, repeats = (8, 1, 1) if arguments.quick else (SESSIONS, TURNS, 4)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), sessions, turns, repeats)
    conditions = {"sessions": sessions, "tokens_per_second": RATE, "quick": arguments.quick, "cpu": common.processor()}
    common.report("gateway_process", figures, {}, conditions, arguments.json)


if __name__ == "__main__":
    main()
