"""Episodes of up to 8 turns while versions come and faults strike: what is lost, and whether tokens are what they were.

Environments raise, hang and take their worker process with them, and actors are killed at work. They answer with all of
unicode and names of special tokens. What each engine has sampled is noted in a file: an embedded actor does that
itself, of vLLM and SGLang the answers are noted as they come in. What the episodes hold is compared with that, and
their log-probs with those of this process under the version of each token. Part of agents.py.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.chat_models import END, SPECIAL, token_id
from tests.integration_tests.recording_actor import RECORD
from torchtitan.inference.engines.sidecar.sidecar_process import AgentClient
from torchtitan.inference.pool import actor_process
from torchtitan.inference.pool.actor import Actor
from torchtitan.inference.pool.actor_pool import InferencePool
from torchtitan.inference.types import Completion, EngineCall, GenerateRequest, Given, SamplingParameters
from torchtitan.models.layers.attention import PackedLayout
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.rollout.data.prompts import PromptMaker
from torchtitan.rollout.environments.environment_pool import EnvironmentPool
from torchtitan.rollout.flow.episodes import EpisodePlayer
from torchtitan.rollout.types import Prompt, Trajectory
from torchtitan.utils.json_lines import EventLog

if TYPE_CHECKING:
    from benchmarks.agents import Stand

GROUP, TURNS, ROOM, AT_A_TIME = 8, 8, 200, 8
START = token_id("<|im_start|>")
# Turns end at one of these after about ten tokens.
STOPS = [END, *range(100, 126)]
POLL_S = 0.02
Played = list[tuple[Prompt, list[Trajectory]]]


def record_all(folder: Path, backend: str) -> Path:
    """Have what the actors sample noted from now on; returns the file."""
    record = folder / "record.jsonl"
    if backend == "embedded":
        _have_actors_note(record)
    else:
        _note_answers(record, backend)
    return record


def _have_actors_note(record: Path) -> None:
    """Those that are started from now on."""
    real = actor_process.actor_command

    def command(*arguments: Any) -> list[str]:
        replaced = {"torchtitan.inference.engines.embedded": "tests.integration_tests.recording_actor"}
        return [replaced.get(part, part) for part in real(*arguments)]

    actor_process.actor_command = command  # type: ignore[assignment]
    os.environ[RECORD] = str(record)


def _note_answers(record: Path, backend: str) -> None:
    """The JSON of a foreign engine, before any code of ours has made a completion of it."""
    real = AgentClient._ask

    async def ask(client: AgentClient, phase: str, call: EngineCall, timeout_s: float, most_bytes: int) -> Any:
        pieces = await real(client, phase, call, timeout_s, most_bytes)
        if phase == "generate":
            answer = json.loads(b"".join(pieces))
            if backend == "vllm":
                prompt, choice = call.body["token_ids"], answer["choices"][0]
                token_ids = choice["token_ids"]
                log_probs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            else:
                prompt, sample = call.body["input_ids"][0], answer[0]
                token_ids = sample["output_ids"]
                log_probs = [row[0] for row in sample["meta_info"]["output_token_logprobs"]]
            with record.open("a") as file:
                print(json.dumps([None, prompt, {"token_ids": token_ids, "log_probs": log_probs}]), file=file)
        return pieces

    AgentClient._ask = ask  # type: ignore[method-assign]


async def kill_actors(pool: InferencePool, kills: int) -> int:
    """One by one, at work, while all are there; returns how many when it is cancelled."""
    killed = 0
    try:
        while killed < kills:
            ready = [actor for actor in pool._actors if actor.state.value == "ready"]
            busy = next((actor for actor in ready if actor.load > 0), None)
            if len(ready) == len(pool._actors) and busy is not None:
                _kill(busy)
                killed += 1
                while busy.state.value == "ready":  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
            await asyncio.sleep(POLL_S)
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        pass
    return killed


def _kill(actor: Actor) -> None:
    process = actor._process
    assert process is not None and process.pid is not None
    os.kill(process.pid, signal.SIGKILL)


async def play(stand: Stand, folder: Path, groups: int, faults: dict[str, int], kills: int) -> tuple[Played, int, int]:
    """(what was played, episodes lost, actors killed). faults: of environments, by their kind; each that strikes leaves
    a file mark-…"""
    config = stand.config
    config.rollout.max_completion_tokens, config.rollout.chat_template = ROOM, True
    environment = config.environment
    environment.sandbox.isolate = False  # it leaves marks
    environment.factory = "tests.unit_tests.rollout.environment_examples:Struck"
    environment.max_turns, environment.num_workers, environment.step_timeout_s = TURNS, 2, 20.0
    tokenizer = Tokenizer(config.model.hf_assets_path)
    maker = PromptMaker(config, tokenizer)
    environments = EnvironmentPool(config, EventLog(folder / "episodes.jsonl"), folder / "environments.log")
    player = EpisodePlayer(config, stand.pool, environments, maker, tokenizer)
    await environments.start()
    kinds = [kind for kind, count in faults.items() for _ in range(count)]
    random.Random(0).shuffle(kinds)
    # Spread over the whole run.
    struck = {(place * groups) // max(1, len(kinds)): kind for place, kind in enumerate(kinds)}
    prompts = []
    for index in range(groups):
        row = {"prompt": "hello", "name": index, "fault": struck.get(index, ""), "mark": str(folder / f"mark-{index}")}
        prompts.append(maker.make(row, index))
    sampling = SamplingParameters(ROOM, GROUP, stop_token_ids=STOPS, seed=7)
    limit = asyncio.Semaphore(AT_A_TIME)

    async def group(prompt: Prompt) -> list[Trajectory]:
        async with limit:
            return await player.play(prompt, GenerateRequest(f"faults-{prompt.index}", [], sampling), 0)

    async def versions() -> None:
        for number in itertools.count(1):
            while player.statistics["turns"] < number * groups * GROUP / 2:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            await stand.publish()

    killing, publishing = asyncio.create_task(kill_actors(stand.pool, kills)), asyncio.create_task(versions())
    try:
        played = await asyncio.gather(*map(group, prompts))
    finally:
        killing.cancel()
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
        await environments.close()
    return list(zip(prompts, played, strict=True)), player.statistics["episodes_lost"], await killing


def check(stand: Stand, played: Played, record: Path) -> dict[str, float]:
    """What is wrong with the tokens of episodes, and how far log-probs are from those of this process."""
    noted = set()
    for line in record.read_text().splitlines():
        _, prompt, completion = json.loads(line)
        noted.add((tuple(prompt), tuple(completion["token_ids"]), tuple(completion["log_probs"])))
    # Other added tokens are text for transformers, too: an observation may hold them (Tokenizer.shield).
    special = {token_id(name) for name in SPECIAL}
    not_sampled = as_tokens = unpublished = 0
    spans: dict[int, list[tuple[list[int], int, list[float]]]] = {}
    for branch in (branch for _, group in played for trajectory in group for branch in trajectory.branches):
        prefix: list[int] = []
        for segment in branch.segments:
            if isinstance(segment, Given):
                ending = [END] if prefix and prefix[-1] != END else []
                expected = [*ending, START, END, START]
                as_tokens += [token for token in segment.token_ids if token in special] != expected
            else:
                not_sampled += not _noted(noted, prefix, segment)
                for span in segment.spans:
                    unpublished += span.epoch != stand.epoch or not 0 <= span.version <= stand.version
                    ids = prefix + segment.token_ids[: span.end]
                    log_probs = segment.log_probs[span.start : span.end]
                    spans.setdefault(span.version, []).append((ids, len(prefix) + span.start, log_probs))
            prefix = prefix + segment.token_ids
    return {
        "turns_not_sampled": float(not_sampled),
        "observations_as_tokens": float(as_tokens),
        "unpublished_versions": float(unpublished),
        "log_prob_difference": _difference(stand, spans),
    }


def _noted(noted: set[Any], prefix: list[int], completion: Completion) -> bool:
    return (tuple(prefix), tuple(completion.token_ids), tuple(completion.log_probs)) in noted


@torch.no_grad()
def _difference(stand: Stand, spans: dict[int, list[tuple[list[int], int, list[float]]]]) -> float:
    """The largest; spans: by version, (tokens up to the span's end, its begin, log-probs)."""
    worst = 0.0
    for version, parts in spans.items():
        stand.policy.load_state_dict(stand.weights[version])
        for chunk in (parts[place : place + 64] for place in range(0, len(parts), 64)):
            tokens = torch.tensor([token for ids, _, _ in chunk for token in ids])
            found, _ = stand.policy(tokens, PackedLayout([len(ids) for ids, _, _ in chunk]), tokens.roll(-1), 1.0)
            begin = 0
            for ids, first, log_probs in chunk:
                computed = found[begin + first - 1 : begin + len(ids) - 1]
                worst = max(worst, float((computed - torch.tensor(log_probs)).abs().max()))
                begin += len(ids)
    return worst
