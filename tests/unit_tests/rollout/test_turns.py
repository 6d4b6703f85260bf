"""Where turns are joined (episodes, the gateway, demonstrations), the tokens are those of the template and the same."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chat_families import FAMILIES, MISTRAL, PHI3, QWEN2_5, Family
from tests.chat_models import TOOLS
from tests.policies import make_debug_checkpoint
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import ConfigError, UserError
from torchtitan.inference.types import Completion, GenerateRequest, SamplingParameters
from torchtitan.rollout.conversation.tokenizer import ChatRenderer, Tokenizer
from torchtitan.rollout.data.demonstrations import Demonstration, DemonstrationMaker
from torchtitan.rollout.data.job_rows import load_datasets
from torchtitan.rollout.data.prompts import PromptMaker
from torchtitan.rollout.environments.environment_pool import EpisodeOutcome, Reply
from torchtitan.rollout.flow.episodes import EpisodePlayer
from torchtitan.rollout.flow.rollouts import EpisodeBackend, Rollouts
from torchtitan.rollout.gateway.calls import Call, Choice
from torchtitan.rollout.gateway.gateway_process import Gateway
from torchtitan.rollout.gateway.server import GatewayServer
from torchtitan.rollout.gateway.session import Session

USER, MORE = {"role": "user", "content": "Hi there"}, {"role": "user", "content": "And  now?"}
CALL = {"id": "000000000", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": CALL["id"], "content": "21, <b>sunny</b>"}
BY_NAME = {family.name: family for family in FAMILIES}


def make_config(directory: Path, *stops: int) -> JobConfig:
    config = JobConfig()
    config.model.hf_assets_path, config.rollout.prompt_column = str(directory), "messages"
    config.rollout.stop_token_ids, config.environment.max_turns = list(stops), 4
    config.training.seq_len, config.rollout.max_completion_tokens = 8192, 4096
    return config


def conversations(family: Family) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Messages and tools."""
    thought = "<think>\nso\n</think>\n\n" if family.thinks else ""
    first, last = ({"role": "assistant", "content": f"{thought}{text}"} for text in ("Yes, sir.", "No."))
    if not family.thinks:
        yield [USER, first, MORE, last], []
    if family.called:
        yield [USER, {"role": "assistant", "content": thought, "tool_calls": [CALL]}, RESULT, last], TOOLS


def answer(token_ids: list[int], finish: Any = "stop") -> Completion:
    return Completion(token_ids, [-0.5] * len(token_ids), finish, [])


class Environments:
    """Answers with the messages of a conversation, until they end."""

    tool_format = "hermes"

    def __init__(self, messages: list[dict[str, Any]]):
        self._messages = iter([*messages[2::2], None])

    @asynccontextmanager
    async def _play(self) -> Any:
        yield self

    async def episode(self, alone: bool = False) -> Any:
        return self._play()

    async def reset(self, row: dict[str, Any]) -> str:
        return ""

    async def act(self, text: str, marked: str) -> Reply:
        message = next(self._messages)
        return Reply([message] if message else [], 0.0, message is None, [], 0)

    async def finish(self) -> EpisodeOutcome:
        return EpisodeOutcome(None, {})


async def play(
    config: JobConfig, tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: Any, answers: list[list[int]]
) -> list[int]:
    """The tokens of an episode in which these answers are sampled."""
    turns = iter(answers)

    async def generate(request: GenerateRequest, min_version: int, shares: str) -> list[Completion]:
        return [answer(next(turns))]

    maker, engines = PromptMaker(config, tokenizer), SimpleNamespace(generate=generate)
    maker.tools, maker._has_environment = tools, True
    player = EpisodePlayer(config, engines, Environments(messages), maker, tokenizer)  # type: ignore[arg-type]
    prompt, sampling = maker.make({"messages": messages[:1]}, 0), SamplingParameters(4096)
    played = await player.play_one(prompt, GenerateRequest("e", prompt.token_ids, sampling), "g", 0)
    assert played is not None and len(played.branches) == 1 and played.finish_reason == "stop"
    return played.branches[0].token_ids


async def gateway_renderer(config: JobConfig, folder: Path) -> ChatRenderer:
    """The renderer of the gateway that this run would start."""
    server = GatewayServer("")
    await server._set_up(**Gateway(config, None, None, folder)._settings)  # type: ignore[arg-type]
    return server._renderer


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_place_gives_the_tokens_of_the_template(family: Family, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = Tokenizer(family.write(tmp_path))
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text_end, call_end = (reference.convert_tokens_to_ids(tag) if tag else -1 for tag in (family.said, family.called))
    config = make_config(tmp_path, *map(reference.convert_tokens_to_ids, family.stops))
    for messages, tools in conversations(family):
        # The reference: transformers renders it whole, up to the end of the last answer.
        whole = reference.apply_chat_template(messages, tools=tools or None, return_dict=False)
        if family.name == "glm4.5":  # the token that begins the next message is the end
            whole.append(text_end)
        whole = whole[: len(whole) - whole[::-1].index(text_end)]
        answers = []
        for i in (1, 3):
            before = reference.apply_chat_template(
                messages[:i], tools=tools or None, add_generation_prompt=True, return_dict=False
            )
            assert whole[: len(before)] == before
            end = call_end if messages[i].get("tool_calls") else text_end
            answers.append(whole[len(before) : whole.index(end, len(before)) + 1])

        made: Demonstration = DemonstrationMaker(config, tokenizer).make({"messages": messages, "tools": tools}, 0)
        (branch,) = made.branches
        assert [sample.token_ids for sample in branch.sampled] == answers and branch.token_ids == whole

        assert asyncio.run(play(config, tokenizer, messages, tools, answers)) == whole

        renderer, session = asyncio.run(gateway_renderer(config, tmp_path)), Session("s", SamplingParameters(8), 8192)
        for i, sampled in zip((1, 3), answers, strict=True):
            prompt = session.prompt(renderer, messages[:i], tools)
            session.record(prompt, completion := answer(sampled))
            session.remember("x", Call(messages[:i], tools), Choice(messages[i], completion))
        (branch,) = session.branches
        assert branch.token_ids == whole
        # An answer that was cut off before its end, or between the tokens that end it, gets what is missing.
        for length in range(3, len(answers[0])) if not tools else ():
            held = [*renderer.render_prompt(messages[:1], tools), *answers[0][:length]]
            if whole[len(held)] in tokenizer.special_token_ids:
                assert [*held, *renderer.following(held, messages[2:3], tools)] == whole[: len(prompt)]


def test_a_turn_that_the_template_rewrites_is_refused_before_it_is_sampled(tmp_path: Path) -> None:
    """As gpt-oss' template, which ends the last answer with <|return|> and earlier ones with <|end|>."""
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
        "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    family = Family("harmony", template, ("<|return|>", "<|endoftext|>", "<|call|>"), "<|return|>")
    renderer = ChatRenderer(Tokenizer(family.write(tmp_path)))
    with pytest.raises(UserError, match="writes a turn differently once others follow"):
        renderer.refuse_environment([])


@pytest.mark.parametrize(
    ("family", "end"),
    [
        (BY_NAME["qwen2.5 base"], "<|im_end|>"), (BY_NAME["qwen2.5"], ""), (BY_NAME["glm4.5"], ""),
        (BY_NAME["cohere2"], ""), (Family("phi3", PHI3, ("<|endoftext|>",), ""), "<|end|>"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)  # fmt: skip
def test_ends_of_turns_that_do_not_stop_sampling_are_warned_of(
    family: Family, end: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = Tokenizer(family.write(tmp_path))
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n{"messages": "Hi"}\n')
    config = make_config(tmp_path)
    config.rollout.dataset, config.rewards.functions = str(tmp_path / "rows.jsonl"), []
    config.rollout.held_out_fraction, config.eval.num_prompts = 0.0, 0
    with caplog.at_level(logging.WARNING):
        load_datasets(config, PromptMaker(config, tokenizer).renderer)
    assert [record.getMessage().count(f"ends turns with {end!r}") for record in caplog.records] == [1] * bool(end)
    if end:
        (warning,) = caplog.records
        (token,) = tokenizer.encode(end)
        assert warning.getMessage().endswith(f"(set rollout.stop_token_ids = [{token}])")
        ChatRenderer(tokenizer, [token]).warn_of_ends()
        assert len(caplog.records) == 1


READS_NO_RESULTS = "{% if tools %}{{ tools }}{% endif %}" + PHI3


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (PHI3, "never reads `tools`"), (MISTRAL, "never reads `tools`"),
        (READS_NO_RESULTS, "does not write the result of a tool .it leaves out the role `tool`"),
        ("{% if tools %}{{ tools }}{% endif %}" + MISTRAL, "the result of a tool .Conversation roles must alternate"),
        (QWEN2_5, ""),
    ],
)  # fmt: skip
def test_tools_that_the_policy_would_not_see_are_refused_at_the_start(
    template: str, problem: str, tmp_path: Path
) -> None:
    tokenizer = Tokenizer(Family("x", template, ("</s>",), "</s>", bos="<s>").write(tmp_path))
    renderer = ChatRenderer(tokenizer)
    chat = '{"messages": [{"role": "user", "content": "Hi"}], "tools": %s}\n'
    (tmp_path / "rows.jsonl").write_text(chat % "null")
    config = make_config(tmp_path)
    config.rollout.dataset, config.rewards.functions = str(tmp_path / "rows.jsonl"), []
    config.rollout.held_out_fraction, config.eval.num_prompts = 0.0, 0
    config.environment.tools = ["my.tools:weather"]

    class Quiet(SimpleNamespace):
        async def start(self) -> None:
            pass

    def start() -> None:
        rollouts = Rollouts(
            config,
            Quiet(),
            Quiet(),
            tokenizer,
            None,
            "now",
            1,
            {"": EpisodeBackend(Quiet(tools=TOOLS, statistics={}, tool_format="hermes"))},  # type: ignore[arg-type]
        )
        asyncio.run(rollouts._start())

    session = Session("s", SamplingParameters(8), 8192)
    if not problem:
        start()
        assert session.prompt(renderer, [USER], TOOLS)
        return
    with pytest.raises(ConfigError, match=rf"\[environment\] my.tools:weather cannot be used: .*{problem}") as refused:
        start()
    assert refused.value.exit_code == 2
    # The gateway answers a UserError of session.prompt with 400.
    result = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT]
    with pytest.raises(UserError, match=problem):
        session.prompt(renderer, result, TOOLS)
    # Rows with tools of their own.
    config.environment.tools = []
    rows = (
        '{"messages": [{"role": "user", "content": "Hi"}, {"role": "tool", "content": "x"}], "tools": [{"name": "a"}]}'
    )
    (tmp_path / "rows.jsonl").write_text(chat % "[]" + rows)
    with pytest.raises(UserError, match=f"row 2: .*{problem}"):
        load_datasets(config, renderer)


def test_a_huge_observation_is_not_encoded_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left out by its beginning would not have fitted."""
    make_debug_checkpoint(tmp_path)
    config, tokenizer = make_config(tmp_path), Tokenizer(tmp_path)
    maker = PromptMaker(config, tokenizer)
    player = EpisodePlayer(config, None, Environments([]), maker, tokenizer)  # type: ignore[arg-type]
    found = []
    for text in ("1" * 3000, "+=" * 40, "12+34=46\n" * 90, " " * 3000):
        for room in (1, 3, 20, 100, 700):
            messages = [{"role": "user", "content": text}]
            found.append(player._overflows(messages, room))
            assert not found[-1] or len(maker.renderer.following_text(messages)) > room
    assert set(found) == {True, False}
    encoded: list[str] = []
    monkeypatch.setattr(tokenizer, "encode", lambda text: encoded.append(text) or [0] * len(text))
    assert player._overflows([{"role": "user", "content": "1" * 3_000_000}], 50)
    assert sum(map(len, encoded)) <= 8 * 50
