"""Whole conversations between engines and environments: what is trained is what the engines sampled, to the token."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from tests.conftest import make_checkpoint
from torchtitan.config.job_config import JobConfig
from torchtitan.grpo.objectives import OBJECTIVES
from torchtitan.inference.engines.embedded.engine import Engine
from torchtitan.inference.engines.embedded.loop import EngineLoop, Unavailable
from torchtitan.inference.types import Completion, GenerateRequest, Given, SamplingParameters
from torchtitan.models.hf_checkpoint import load_policy
from torchtitan.models.layers.attention import PackedLayout
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.rollout.data.prompts import PromptMaker
from torchtitan.rollout.environments.environment_pool import EnvironmentPool
from torchtitan.rollout.flow.episodes import EpisodePlayer
from torchtitan.rollout.flow.group_maker import make_sample
from torchtitan.rollout.flow.journal import decode_batch, encode_batch
from torchtitan.rollout.types import Batch, Failure, Group, Prompt, Trajectory
from torchtitan.trainer.packing import micro_batches
from torchtitan.utils.json_lines import EventLog

HERE = "tests.unit_tests.rollout.environment_examples"
VOCABULARY, SEQ_LEN, ROOM, GROUP = 320, 400, 200, 4
START, END, CALL = 292, 293, 294
SPECIAL = ("<|im_start|>", "<|im_end|>", "<tool_call>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy whose tokens are bytes and pairs of letters, so that texts have many tokenisations."""
    directory = make_checkpoint(
        tmp_path_factory.mktemp("babel"), "qwen3", True, vocab_size=VOCABULARY, eos_token_id=END
    )
    pairs = [(a, b) for a in "abcdef" for b in "abcdef"]
    texts = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in pairs)]
    tokenizer = FastTokenizer(models.BPE({text: i for i, text in enumerate(texts)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<tool_call>"])
    assert [tokenizer.token_to_id(text) for text in SPECIAL] == [START, END, CALL]
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@dataclass
class Actors:
    """Two engines in threads of their own, which get new weights while they sample; one of them dies."""

    checkpoint: Path
    record: dict[str, tuple[list[int], Completion]] = field(default_factory=dict)
    """What was asked and sampled, by request, as the engine has said it"""
    asked: int = 0
    dies_at: int = 40
    """Requests until one of them dies"""
    redone: int = 0

    def __post_init__(self) -> None:
        self.versions: list[dict[str, torch.Tensor]] = []
        weights = dict(load_policy(self.checkpoint).named_parameters())
        for version in range(6):
            noise = torch.Generator().manual_seed(version)
            self.versions.append(
                {
                    name: weight.detach() + 0.02 * torch.randn(weight.shape, generator=noise)
                    for name, weight in weights.items()
                }
            )
        self.loops = []
        for _ in range(2):
            engine = Engine(load_policy(self.checkpoint), 64, SEQ_LEN, in_flight_kv="recompute")
            self.loops.append(EngineLoop(engine, 1, False, lambda: None))
            self.loops[-1].start()
        self.apply(0)

    def apply(self, version: int) -> None:
        for loop in self.loops:
            with contextlib.suppress(Unavailable):  # it has died
                loop.apply("e", version, self.versions[version])

    async def generate(self, request: GenerateRequest, min_version: int = 0, *, shares: str = "") -> list[Completion]:
        """As the pool does it: a request that is lost with its actor is redone on another one."""
        self.asked += 1
        # An actor is chosen, and dies with all that it works on before it has the request.
        loops = [loop for loop in self.loops if not loop._closing]
        loops.sort(key=lambda candidate: hash((request.request_id, id(candidate))))
        if self.asked >= self.dies_at and loops[0] is self.loops[0]:
            loops[0].close(10)
        for loop in loops:
            try:
                completions = await loop.generate(request)
            except Unavailable:
                self.redone += 1
                continue
            self.record[request.request_id] = (list(request.prompt_ids), completions[0])
            return completions
        raise AssertionError("no engine is left")

    def close(self) -> None:
        for loop in self.loops:
            loop.close(10)


@contextmanager
def serving(checkpoint: Path) -> Iterator[Actors]:
    actors = Actors(checkpoint)
    try:
        yield actors
    finally:
        actors.close()


def play(tmp_path: Path, actors: Actors, prompts: int, chat: bool) -> list[tuple[Prompt, list[Trajectory]]]:
    config = JobConfig()
    config.model.hf_assets_path = str(actors.checkpoint)
    config.training.seq_len, config.rollout.max_completion_tokens = SEQ_LEN, ROOM
    config.rollout.chat_template = chat
    config.environment.factory, config.environment.max_turns = f"{HERE}:Babel", 8
    tokenizer = Tokenizer(actors.checkpoint)
    # Turns end at one of these, the end token among them, after about ten tokens.
    stops = [END, *range(100, 130)]
    numbers = random.Random(0)

    async def work() -> list[tuple[Prompt, list[Trajectory]]]:
        environments = EnvironmentPool(config, EventLog(tmp_path / "events.jsonl"))
        maker = PromptMaker(config, tokenizer)
        player = EpisodePlayer(config, actors, environments, maker, tokenizer)
        await environments.start()

        async def disturb() -> None:
            for version in range(1, len(actors.versions)):
                turns = player.statistics["turns"]
                while player.statistics["turns"] < turns + prompts:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                await asyncio.to_thread(actors.apply, version)

        disturbing = asyncio.create_task(disturb())
        try:
            made = [maker.make({"prompt": "hello ab", "name": numbers.random()}, index) for index in range(prompts)]
            sampling = SamplingParameters(ROOM, GROUP, stop_token_ids=stops, seed=7)
            played = await asyncio.gather(
                *(player.play(prompt, GenerateRequest(str(prompt.index), [], sampling), 0) for prompt in made)
            )
        finally:
            disturbing.cancel()
            await environments.close()
        assert player.statistics["episodes_lost"] == 0
        return list(zip(made, played, strict=True))

    return asyncio.run(asyncio.wait_for(work(), 240))


@pytest.mark.parametrize("chat", [True, False])
def test_what_is_trained_is_what_was_sampled(checkpoint: Path, tmp_path: Path, chat: bool) -> None:
    with serving(checkpoint) as actors:
        groups = play(tmp_path, actors, prompts=8, chat=chat)
        assert actors.redone > 0
    trajectories = [member for _, group in groups for member in group]
    assert len(trajectories) == 8 * GROUP and {episode.finish_reason for episode in trajectories} == {"stop", "length"}
    tokenizer = Tokenizer(checkpoint)
    sampled = {id(completion): prompt for prompt, completion in actors.record.values()}
    versions = set()
    for trajectory in trajectories:
        (branch,) = trajectory.branches
        assert len(branch) <= len(branch.segments[0].token_ids) + ROOM
        if chat:  # reward functions read what the policy has said
            assert trajectory.completion == "\n".join(tokenizer.decode(reply.token_ids) for reply in branch.sampled)
        before: list[int] = []
        for number, segment in enumerate(branch.segments):
            if isinstance(segment, Given):
                text = tokenizer.decode(segment.token_ids, skip_special=False)
                special = [token for token in segment.token_ids if token in (START, END)]
                # What the template writes, and nothing that the environment has said, is a special token.
                ended = number == 0 or before[-1] == END
                assert special == ([START, END, START] if ended else [END, START, END, START]) * chat
                assert not chat or text.endswith("<|im_end|>\n<|im_start|>assistant\n")
            else:
                assert sampled.pop(id(segment)) == before
                versions |= {(span.epoch, span.version) for span in segment.spans}
            before = before + segment.token_ids
    assert len(versions) > 2 and versions <= {("e", version) for version in range(6)}
    _log_probs_are_the_trainers(checkpoint, actors, trajectories)
    _batches_hold_all_of_it(groups)


def _log_probs_are_the_trainers(checkpoint: Path, actors: Actors, trajectories: list[Trajectory]) -> None:
    policy = load_policy(checkpoint)
    scored: dict[tuple[int, int], torch.Tensor] = {}
    for version, weights in enumerate(actors.versions):
        policy.load_state_dict(weights, strict=False)
        for number, trajectory in enumerate(trajectories):
            turns = trajectory.branches[0].sampled
            if all(span.version != version for turn in turns for span in turn.spans):
                continue
            tokens = torch.tensor(trajectory.branches[0].token_ids)
            with torch.no_grad():
                scored[number, version], _ = policy(tokens[:-1], PackedLayout([len(tokens) - 1]), tokens[1:])
    worst = 0.0
    for number, trajectory in enumerate(trajectories):
        begin = 0
        for segment in trajectory.branches[0].segments:
            if isinstance(segment, Completion):
                for span in segment.spans:
                    found = torch.tensor(segment.log_probs[span.start : span.end])
                    wanted = scored[number, span.version][begin + span.start - 1 : begin + span.end - 1]
                    worst = max(worst, (found - wanted).abs().max().item())
            begin += len(segment.token_ids)
    assert worst < 2e-4


def _batches_hold_all_of_it(groups: list[tuple[Prompt, list[Trajectory]]]) -> None:
    """Through the journal's form into micro-batches: the targets are the sampled tokens, in their places."""
    made = [Group(prompt.index, [make_sample(trajectory, 1.0, {}) for trajectory in group]) for prompt, group in groups]
    batch = Batch(6, made)
    assert decode_batch(encode_batch(batch)) == batch
    parts = micro_batches(
        batch.samples, OBJECTIVES["dapo"], version=6, budget=2000, max_completion_tokens=ROOM, mask_truncated=False,
        rank=0, ranks=1, device=torch.device("cpu"),
    )  # fmt: skip
    trained = [branch for part in parts for branch in part.trained]
    assert sorted(map(id, trained)) == sorted(id(sample.branches[0]) for sample in batch.samples)
    for part in parts:
        wanted = [token for branch in part.trained for completion in branch.sampled for token in completion.token_ids]
        assert part.targets.tolist() == wanted


def test_an_episode_without_room_is_lost_and_says_why(checkpoint: Path, tmp_path: Path) -> None:
    config = JobConfig()
    config.training.seq_len, config.environment.factory = SEQ_LEN, f"{HERE}:Counter"
    tokenizer = Tokenizer(checkpoint)
    maker = PromptMaker(config, tokenizer)

    async def work() -> EpisodePlayer:
        environments = EnvironmentPool(config, EventLog(tmp_path / "events.jsonl"))
        player = EpisodePlayer(config, None, environments, maker, tokenizer)  # type: ignore[arg-type]
        await environments.start()
        try:
            request = GenerateRequest("x", [], SamplingParameters(ROOM, 2))
            played = await player.play(maker.make({"prompt": "h" * SEQ_LEN}, 0), request, 0)
            assert [trajectory.failure for trajectory in played] == [Failure.NOT_BEGUN] * 2
        finally:
            await environments.close()
        return player

    player = asyncio.run(asyncio.wait_for(work(), 60))
    # The environment has added two characters.
    assert player.statistics["episodes_lost"] == 2 and f"has {SEQ_LEN + 2} tokens" in player.last_failure


def test_an_episode_that_is_begun_again_is_the_same(checkpoint: Path, tmp_path: Path) -> None:
    """The same seeds give the same conversation: what was redone after a failure is what it would have been."""
    with serving(checkpoint) as actors:
        actors.versions = actors.versions[:1]
        first = play(tmp_path, actors, prompts=2, chat=True)
        again = play(tmp_path, actors, prompts=2, chat=True)

    def tokens(groups: list[tuple[Prompt, list[Trajectory]]]) -> Any:
        return [[trajectory.branches[0].token_ids for trajectory in group] for _, group in groups]

    assert tokens(first) == tokens(again)
