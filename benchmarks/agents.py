"""What conversations of many turns cost: prompts that are computed again, and the gateway in front of the engines.

    python benchmarks/agents.py --json
    python benchmarks/agents.py --episodes 200 --repeats 2 --json     a fifth of the episodes and faults
    python benchmarks/agents.py --backend vllm --json                 all but the second, of a vLLM
    python benchmarks/agents.py --backend vllm --faults --json        what the faults say alone

A small random Qwen3 that a trainer in this process publishes, and an actor that a pool starts. Groups of 8 episodes
with the same beginning, 8 turns each; every turn is a request of its own.

    prefill_saved      tokens of all prompts ÷ those of them that the engine has computed
    gateway_overhead   tokens per second of 64 sessions, by chat completions through the gateway ÷ conversations of the
                       same lengths as tokens, straight to the pool; median over turns of both
    stale_kv_reads     completions that were asked for after a new version had come, in conversations that an older one
                       began, whose log-probs are not those of that version, computed anew in this process
    episodes_lost      of 1,000 of up to 8 turns on two embedded actors, with 20 faults and new versions meanwhile, or
                       of 40 on two of the other engines, with 4 faults; turns_not_sampled, observations_as_tokens,
                       unpublished_versions and log_prob_difference are of the tokens of these (agent_faults.py)
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import asyncio
import secrets
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

import aiohttp  # noqa: E402
import torch  # noqa: E402

from benchmarks import agent_faults, common  # noqa: E402
from tests.chat_models import VOCABULARY, write_chat_tokenizer  # noqa: E402
from torchtitan.config.job_config import JobConfig  # noqa: E402
from torchtitan.config.job_config import WeightSync as WeightSyncConfig  # noqa: E402
from torchtitan.distributed.placement import unique_parameters  # noqa: E402
from torchtitan.inference.actor_client import TOKEN_VARIABLE  # noqa: E402
from torchtitan.inference.pool.actor_pool import InferencePool  # noqa: E402
from torchtitan.inference.types import Completion, GenerateRequest, SamplingParameters  # noqa: E402
from torchtitan.models.decoder import Decoder  # noqa: E402
from torchtitan.models.hf_checkpoint import export_policy  # noqa: E402
from torchtitan.models.layers.attention import PackedLayout  # noqa: E402
from torchtitan.models.shape.model_args import ModelArgs  # noqa: E402
from torchtitan.rollout.conversation.tokenizer import ChatRenderer, Tokenizer  # noqa: E402
from torchtitan.rollout.gateway.gateway_process import Gateway  # noqa: E402
from torchtitan.utils.json_lines import EventLog  # noqa: E402
from torchtitan.weight_sync.facade import WeightSync  # noqa: E402

BARS = {
    "prefill_saved": (">=", 5.0),
    "gateway_overhead": (">=", 0.9),
    "stale_kv_reads": ("<=", 0.0),
    "episodes_lost": ("<=", 0.0),
    "turns_not_sampled": ("<=", 0.0),
    "observations_as_tokens": ("<=", 0.0),
    "unpublished_versions": ("<=", 0.0),
    "log_prob_difference": ("<=", 1e-4),
}
GROUP, START_SECONDS, LENGTH = 8, 600.0, 2048
# Of log-probs of two engines in fp32, for this model.
TOLERANCE = 1e-4
# Counters of foreign engines: (prompt tokens, those of them that were not computed).
COUNTERS = {
    "embedded": ("engine_prefilled_tokens_total", "engine_reused_tokens_total"),
    "vllm": ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    "sglang": ("sglang:prompt_tokens_total", "sglang:cached_tokens_total"),
}


@dataclass(frozen=True)
class Size:
    """Of the work."""

    groups: int
    turns: int
    prompt: int
    sampled: int
    observed: int


class Stand:
    """A trainer's weights, a pool of actors, and a gateway."""

    def __init__(self, folder: Path, backend: str, python: str, actors: int = 1):
        args = ModelArgs("qwen3", VOCABULARY, 128, 256, 4, 4, 2, 32, max_position_embeddings=LENGTH)
        self.policy = Decoder(args)
        self.policy.initialize_weights(0, std=0.1)
        model = folder / "model"
        export_policy(self.policy, model)
        write_chat_tokenizer(model)
        self.config = config = JobConfig()
        config.model.hf_assets_path = str(model)
        config.training.seq_len, config.environment.max_turns = LENGTH, 64
        config.inference.backend, config.inference.engine.python = backend, python
        config.inference.num_actors, config.inference.threads_per_actor = actors, 1
        config.inference.max_sequences = 64
        config.inference.startup_timeout_s = START_SECONDS
        config.inference.engine.args = {"sglang": {"enable-metrics": True}}.get(backend, {})
        self.epoch, token = f"bench-{secrets.token_hex(4)}", secrets.token_urlsafe(16)
        os.environ.pop(TOKEN_VARIABLE, None)
        parameters = unique_parameters(dict(self.policy.named_parameters()))
        self.sync = WeightSync(WeightSyncConfig(), parameters, epoch=self.epoch, token=token, run_dir=folder)
        events = EventLog(folder / "events.jsonl")
        self.pool = InferencePool(config, self.epoch, token, folder, events)
        self.gateway = Gateway(config, self.pool, events, folder)
        self.version = -1
        self.weights: list[dict[str, torch.Tensor]] = []
        """Of every version"""

    async def start(self) -> None:
        await self.pool.start()
        await self.pool.connect_weights(self.sync.registry_address)
        await self.publish()

    async def publish(self) -> None:
        """The next version, once the actor serves it."""
        no = not self.sync.reserve()
        self.sync.fence()
        self.version += 1
        if self.version:
            generator = torch.Generator().manual_seed(self.version)
            with torch.no_grad():
                for parameter in self.policy.parameters():
                    parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        self.weights.append({name: value.clone() for name, value in self.policy.state_dict().items()})
        self.sync.commit(self.version, int(no))
        self.sync.fence()
        # The first one has to reach all actors, so that there are some to be killed.
        actors = 1 if self.version else len(self.pool.actors)
        outcome = await asyncio.to_thread(self.sync.wait_until_applied, self.version, START_SECONDS, actors)
        if not outcome.applied:
            raise SystemExit(f"version {self.version} did not come: {outcome.missing}")

    async def close(self) -> None:
        await self.gateway.close()
        await self.pool.close()
        self.sync.close()

    async def generate(self, name: str, prompt: list[int], tokens: int, shares: str = "") -> Completion:
        request = GenerateRequest(name, prompt, SamplingParameters(tokens, seed=zlib.crc32(name.encode())))
        (completion,) = await self.pool.generate(request, shares=shares)
        return completion

    async def prompt_tokens(self) -> tuple[float, float]:
        """(asked for, computed) by the engine so far."""
        (actor,) = self.pool._actors
        client: Any = actor._client
        engine = getattr(client, "_engine", None) or client.client
        headers = {"Authorization": f"Bearer {engine._token}"}
        async with aiohttp.ClientSession(headers=headers) as http, http.get(engine.url + "/metrics") as response:
            lines = [line.split() for line in (await response.text()).splitlines() if not line.startswith("#")]
        counts: dict[str, float] = {}
        for name, value in (line[:2] for line in lines if len(line) >= 2):
            counts[name.partition("{")[0]] = counts.get(name.partition("{")[0], 0.0) + float(value)
        first, second = (counts.get(name, 0.0) for name in COUNTERS[self.config.inference.backend])
        return (first + second, first) if self.config.inference.backend == "embedded" else (first, first - second)

    @torch.no_grad()
    def is_stale(self, prompt: list[int], completion: Completion) -> bool:
        """Whether its log-probs are not those of the weights as they are."""
        ids = torch.tensor(prompt + completion.token_ids)
        log_probs, _ = self.policy(ids, PackedLayout([len(ids)]), ids.roll(-1), 1.0)
        difference = log_probs[len(prompt) - 1 : -1] - torch.tensor(completion.log_probs)
        return not float(difference.abs().max()) <= TOLERANCE


def tokens_of(number: int, count: int) -> list[int]:
    """Letters."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(65, 90, (count,), generator=generator).tolist()


async def conversation(stand: Stand, name: str, group: int, size: Size) -> int:
    """As tokens, straight to the pool; returns how many were sampled."""
    prompt, sampled = tokens_of(group, size.prompt), 0
    for turn in range(size.turns):
        done = await stand.generate(f"{name}-{turn}", prompt, size.sampled, shares=name)
        sampled += len(done.token_ids)
        prompt = prompt + done.token_ids + tokens_of(turn, size.observed)
    return sampled


async def chat(stand: Stand, http: aiohttp.ClientSession, name: str, size: Size) -> int:
    """The same through the gateway."""
    sampling = SamplingParameters(size.sampled, seed=zlib.crc32(name.encode()))
    access = await stand.gateway.open(name, sampling, shares=name)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x" * size.prompt}]
    headers = {"Authorization": f"Bearer {access.key}"}
    for turn in range(size.turns):
        body = {"model": "chat", "messages": messages, "max_tokens": size.sampled}
        async with http.post(f"{access.base_url}/chat/completions", json=body, headers=headers) as response:
            answer = await response.json()
            if response.status != 200:
                raise SystemExit(f"the gateway answered {response.status}: {answer}")
        messages += [answer["choices"][0]["message"], {"role": "user", "content": f"{turn}" * size.observed}]
    played = await stand.gateway.end(name)
    return sum(len(segment.token_ids) for branch in played.branches for segment in branch.sampled)


async def measure_prefill(stand: Stand, size: Size) -> float:
    before = await stand.prompt_tokens()
    groups = [group for group in range(size.groups) for _ in range(GROUP)]
    await asyncio.gather(*(conversation(stand, f"prefill-{i}", 1000 + group, size) for i, group in enumerate(groups)))
    after = await stand.prompt_tokens()
    return (after[0] - before[0]) / (after[1] - before[1])


def as_rendered(model: str, size: Size) -> Size:
    """With the tokens that the template puts around each message, so that the engine has as much to do."""
    renderer = ChatRenderer(Tokenizer(model, {}))
    first, next_ = ([{"role": "user", "content": "x" * length}] for length in (size.prompt, size.observed))
    prompt = renderer.render_prompt(first, [])
    observed = renderer.following(prompt + tokens_of(0, size.sampled), next_, [])
    return replace(size, prompt=len(prompt), observed=len(observed))


async def measure_gateway(stand: Stand, sessions: int, size: Size, repeats: int) -> float:
    rates: dict[str, list[float]] = {"straight": [], "gateway": []}
    rendered = as_rendered(stand.config.model.hf_assets_path, size)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        for turn in range(-1, repeats):
            for condition in list(rates)[:: 1 if turn % 2 else -1]:
                started_at = time.perf_counter()
                names = [f"{condition}-{turn}-{i}" for i in range(sessions)]
                if condition == "straight":
                    work = [conversation(stand, name, 2000, rendered) for name in names]
                else:
                    work = [chat(stand, http, name, size) for name in names]
                sampled = sum(await asyncio.gather(*work))
                if turn >= 0:
                    rates[condition].append(sampled / (time.perf_counter() - started_at))
    return common.median_ratio(rates["gateway"], rates["straight"])


async def count_stale(stand: Stand, size: Size, versions: int) -> tuple[int, int]:
    """(stale completions, completions): a version comes between any two turns, while a request is under way."""
    prompts = [tokens_of(3000 + number // GROUP, size.prompt) for number in range(size.groups * GROUP)]
    stale = asked = 0
    for turn in range(versions):
        running = asyncio.create_task(stand.generate(f"long-{turn}", prompts[0], 20 * size.sampled))
        names = [f"stale-{turn}-{number}" for number in range(len(prompts))]
        done: Sequence[Completion] = await asyncio.gather(
            *(stand.generate(name, prompt, size.sampled) for name, prompt in zip(names, prompts, strict=True))
        )
        stale += sum(stand.is_stale(prompt, completion) for prompt, completion in zip(prompts, done, strict=True))
        asked += len(done)
        prompts = [
            prompt + item.token_ids + tokens_of(turn, size.observed) for prompt, item in zip(prompts, done, strict=True)
        ]
        await stand.publish()
        await running
    return stale, asked


async def measure_faults(
    backend: str, python: str, conditions: dict[str, Any], episodes: int, quick: bool
) -> dict[str, float]:
    groups, kills, faults = episodes // GROUP, 4, {"raises": 8, "crashes": 5, "hangs": 3}
    if groups < 125:
        kills, faults = 1, {kind: max(1, count * groups // 125) for kind, count in faults.items()}
    if quick:
        groups, kills, faults = 4, 1, {"raises": 1}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record = agent_faults.record_all(folder, backend)
        stand = Stand(folder, backend, python, actors=2)
        stand.config.inference.in_flight_kv = "recompute"
        try:
            await stand.start()
            played, lost, killed = await agent_faults.play(stand, folder, groups, faults, kills)
        finally:
            await stand.close()
        trajectories = [trajectory for _, group in played for trajectory in group]
        turns = sum(len(branch.sampled) for trajectory in trajectories for branch in trajectory.branches)
        struck = len(list(folder.glob("mark-*")))  # noqa: ASYNC240
        conditions |= {
            "faults": struck + killed,
            "episodes": len(trajectories),
            "turns": turns,
            "versions": stand.version + 1,
        }
        return {"episodes_lost": float(lost), **agent_faults.check(stand, played, record)}


async def measure(backend: str, python: str, quick: bool, repeats: int, conditions: dict[str, Any]) -> dict[str, float]:
    """All but what the faults say."""
    size = Size(1, 4, 128, 8, 16) if quick else Size(2, 8, 256, 32, 32)
    with tempfile.TemporaryDirectory() as folder:
        stand = Stand(Path(folder), backend, python)
        try:
            common.progress("starting")
            await stand.start()
            common.progress("prompts that are computed")
            figures = {"prefill_saved": await measure_prefill(stand, size)}
            if backend == "embedded":
                common.progress("the gateway")
                sessions, repeats = (8, 1) if quick else (64, repeats)
                talk = Size(1, 2 if quick else 4, 128, 64, 32)
                figures["gateway_overhead"] = await measure_gateway(stand, sessions, talk, repeats)
            common.progress("keys of older weights")
            stale, asked = await count_stale(stand, size, 2 if quick else 8)
            figures["stale_kv_reads"] = float(stale)
        finally:
            await stand.close()
    conditions |= {"size": vars(size), "compared": asked}
    return figures


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--backend", choices=tuple(COUNTERS), default="embedded")
    parser.add_argument("--engine-python", default="", help="as inference.vllm.python")
    parser.add_argument("--faults", action="store_true", help="only episodes_lost and what stands beside it")
    parser.add_argument("--episodes", type=int, help="with faults (1,000, or 40 of a foreign engine)")
    parser.add_argument("--repeats", type=int, default=5, help="of gateway_overhead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    engine = arguments.backend, arguments.engine_python
    episodes = arguments.episodes or (1000 if arguments.backend == "embedded" else 40)
    figures: dict[str, float] = {}
    conditions = {"backend": arguments.backend, "quick": arguments.quick, "cpu": common.processor()}
    if not arguments.faults:
        figures |= asyncio.run(measure(*engine, arguments.quick, arguments.repeats, conditions))
    common.progress("faults")
    figures |= asyncio.run(measure_faults(*engine, conditions, episodes, arguments.quick))
    common.report("agents", figures, BARS, conditions, arguments.json)


if __name__ == "__main__":
    main()
