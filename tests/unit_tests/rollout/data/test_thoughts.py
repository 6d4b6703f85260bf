"""What of a turn is its thought and what its answer, for every family, in rewards, evaluations and the gateway."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chat_families import Family
from tests.chat_models import CHAT_TEMPLATE
from torchtitan.config.job_config import JobConfig
from torchtitan.inference.types import Completion, GenerateRequest, SamplingParameters, VersionSpan
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.rollout.conversation.tool_formats.registry import parse_tool_calls
from torchtitan.rollout.conversation.turns import TurnReader
from torchtitan.rollout.data.prompts import PromptMaker
from torchtitan.rollout.environments.environment_pool import EpisodeOutcome, Reply
from torchtitan.rollout.flow.episodes import EpisodePlayer
from torchtitan.rollout.flow.group_maker import GroupMaker
from torchtitan.rollout.gateway.calls import Call, make_choice
from torchtitan.rollout.rewards.reward_pool import RewardPool

OSS_MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>")
OSS = """{%- for m in messages %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""


def family(name: str, special: tuple[str, ...], opens: str = "") -> Family:
    """A family with these special tokens; opens: what its template writes behind the beginning of a turn."""
    template = CHAT_TEMPLATE.replace(
        "<|im_start|>assistant\\n' }}{%- endif", f"<|im_start|>assistant\\n{opens}' }}}}{{%- endif"
    )
    return Family(name, template, ("<|im_end|>",), "<|im_end|>", "<|im_end|>", stops=special)


FAMILIES = {
    model_family.name: model_family
    for model_family in (
        family("tags", ()),
        family("tags that the prompt opens", (), "<think>\\n"),
        family("a thought that the prompt closes", (), "<think>\\n\\n</think>\\n\\n"),
        family("special tags", ("<think>", "</think>")),
        family("magistral", ("[THINK]", "[/THINK]")),
        family("seed", ("<seed:think>", "</seed:think>")),
        family("command", ("<|START_THINKING|>", "<|END_THINKING|>")),
        family("gemma", ("<|channel>", "<channel|>")),
        Family("gpt-oss", OSS, ("<|return|>", "<|call|>"), "<|return|>", "<|call|>", stops=OSS_MARKS),
    )
}
ANALYSIS, NEXT = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
FINAL, END = "<|channel|>final<|message|>", "<|return|>"
DO_NOT_KNOW, BOX = "I do not know.", r"\boxed{12}"

# Family, what it says, its thought, its answer, accuracy (the reference is 12), format.
TURNS: list[tuple[str, str, str | None, str, float, float]] = [
    ("tags", "12", None, "12", 1, 0),
    ("tags", "<think>6+6</think>\n\n12", "6+6", "12", 1, 1),
    ("tags", r"<think>\boxed{12}</think>I do not know.", r"\boxed{12}", "I do not know.", 0, 1),
    ("tags", r"<think>is it \boxed{12}", r"is it \boxed{12}", "", 0, 0),
    ("tags", r"6+6 is \boxed{12}</think> 13", r"6+6 is \boxed{12}", "13", 0, 0),
    ("tags", "<think>a</think>5<think>b</think>12", "a\n\nb", "5\n\n12", 1, 0),
    ("tags", "12 <think>or 13", "or 13", "12", 1, 0),
    ("tags", "[THINK]13[/THINK] is a mark of others: 12", None, "[THINK]13[/THINK] is a mark of others: 12", 1, 0),
    ("tags that the prompt opens", r"is it \boxed{12}", "\nis it \\boxed{12}", "", 0, 0),
    ("tags that the prompt opens", "6+6</think>\n12", "\n6+6", "12", 1, 1),
    ("a thought that the prompt closes", "12", "\n\n", "12", 1, 1),
    ("special tags", r"<think>two and two is \boxed{12}", r"two and two is \boxed{12}", "", 0, 0),
    ("special tags", "<think>6+6</think>12", "6+6", "12", 1, 1),
    ("magistral", "[THINK]6+6[/THINK]12", "6+6", "12", 1, 1),
    ("magistral", r"[THINK]\boxed{12}[/THINK]I do not know.", r"\boxed{12}", "I do not know.", 0, 1),
    ("magistral", r"[THINK]so \boxed{12}", r"so \boxed{12}", "", 0, 0),
    ("seed", "<seed:think>13</seed:think>12", "13", "12", 1, 1),
    ("command", "<|START_THINKING|>13<|END_THINKING|>12", "13", "12", 1, 1),
    ("gemma", "<|channel>thought\n13<channel|>12", "\n13", "12", 1, 1),
    # gpt-oss, well-formed
    ("gpt-oss", f"{ANALYSIS}6+6{NEXT}{FINAL}The answer is 12.{END}", "6+6", "The answer is 12.", 1, 1),
    ("gpt-oss", f"{ANALYSIS}{BOX}{NEXT}{FINAL}{DO_NOT_KNOW}{END}", BOX, DO_NOT_KNOW, 0, 1),
    ("gpt-oss", rf"{ANALYSIS}\boxed{{13}}? no{NEXT}{FINAL}It is 12.{END}", r"\boxed{13}? no", "It is 12.", 1, 1),
    ("gpt-oss", f"{ANALYSIS}6+6{NEXT}<|channel|>commentary<|message|>I add.{NEXT}{FINAL}12{END}", "6+6", "12", 1, 1),
    ("gpt-oss", f"{ANALYSIS}6+6{NEXT}<|channel|>final <|constrain|>json<|message|>12", "6+6", "12", 1, 1),
    # and ill-formed
    ("gpt-oss", f"{ANALYSIS}The sum is 12, so I must say 12", "The sum is 12, so I must say 12", "", 0, 0),
    ("gpt-oss", f"{ANALYSIS}12{END}", "12", "", 0, 0),
    ("gpt-oss", f"{FINAL}12{END}", None, "12", 1, 0),
    ("gpt-oss", f"{FINAL}12{NEXT}{ANALYSIS}13{END}", "13", "12", 1, 0),
    ("gpt-oss", f"{ANALYSIS}6+6{NEXT}{FINAL} {END}", "6+6", "", 0, 0),
    ("gpt-oss", f"{ANALYSIS}6+6{NEXT}<|channel|>finally<|message|>12{END}", "6+6", "", 0, 0),
    ("gpt-oss", f"{ANALYSIS}6+6<|end|>12{END}", "6+6", "", 0, 0),
    ("gpt-oss", f"{ANALYSIS}6+6<|end|>{FINAL}12{END}", "6+6", "12", 1, 0),
    ("gpt-oss", f"{ANALYSIS}6+6<|end|><|start|>user<|message|>12<|end|>", "6+6", "", 0, 0),
    ("gpt-oss", "12", None, "12", 1, 0),
    ("gpt-oss", f"analysis 6+6 assistantfinal 12{END}", None, "analysis 6+6 assistantfinal 12", 1, 0),
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    found = {}
    for name, model_family in FAMILIES.items():
        directory = model_family.write(tmp_path_factory.mktemp("family"))
        if name == "special tags":
            data = json.loads((directory / "tokenizer.json").read_text())
            for token in data["added_tokens"]:
                token["special"] |= token["content"] in ("<think>", "</think>")
            (directory / "tokenizer.json").write_text(json.dumps(data))
        found[name] = Tokenizer(directory)
    return found


def sampled(tokenizer: Tokenizer, text: str, finish: Any = "stop") -> Completion:
    ids = tokenizer.encode(text)
    ids = ids if ids[-1] in tokenizer.eos_token_ids or finish == "length" else [*ids, tokenizer.eos_token_ids[0]]
    return Completion(ids, [-0.5] * len(ids), finish, [VersionSpan("e", 0, 0, len(ids))])


def make_config(tokenizer: Tokenizer, *functions: str) -> JobConfig:
    config = JobConfig()
    config.model.hf_assets_path, config.rollout.chat_template = str(tokenizer.directory), True
    config.rewards.functions, config.rewards.sandbox.isolate = list(functions), False
    config.rewards.num_workers, config.training.seq_len = 1, 4096
    return config


@pytest.mark.parametrize("turn", TURNS, ids=lambda turn: f"{turn[0]}: {turn[1]}")
def test_thought_and_answer(turn: tuple[Any, ...], tokenizers: dict[str, Tokenizer]) -> None:
    name, output, thought, answer, *_ = turn
    tokenizer = tokenizers[name]
    prompt = PromptMaker(make_config(tokenizer), tokenizer).make({"prompt": "6+6?"}, 0)
    found = TurnReader(tokenizer).read(prompt.token_ids, sampled(tokenizer, output).token_ids)
    assert (found.thought, found.final_text) == (thought, answer)


@pytest.mark.parametrize("name", FAMILIES)
def test_rewards_and_evaluations_read_it_so(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    """Through the path of a training group, and that of an evaluation, which names its function."""
    tokenizer, turns = tokenizers[name], [turn for turn in TURNS if turn[0] == name]
    config = make_config(tokenizer, "accuracy", "format", "tests.unit_tests.rollout.reward_examples:parts_of_a_turn")

    async def generate(request: Any, min_version: int) -> list[Completion]:
        return [sampled(tokenizer, output) for _, output, *_ in turns]

    async def score() -> Any:
        pool = RewardPool(config)
        await pool.start()
        try:
            maker = GroupMaker(config, SimpleNamespace(generate=generate), pool, tokenizer, "e")
            prompt = PromptMaker(config, tokenizer).make({"prompt": "6+6?", "answer": "12"}, 0)
            group = await maker.sample(prompt, maker.request(prompt), 0)
            return group, await maker.score(prompt, group), await maker.score(prompt, group, ["accuracy"])
        finally:
            await pool.close()

    group, trained, evaluated = asyncio.run(score())
    assert [(parts["accuracy"], parts["format"]) for _, parts in trained] == [turn[4:] for turn in turns]
    assert [reward for reward, _ in evaluated] == [turn[4] for turn in turns]
    assert [(sample.extra["thought"], sample.extra["final"]) for sample in group] == [turn[2:4] for turn in turns]
    assert [sample.completion for sample in group] == [tokenizer.decode(tokenizer.encode(turn[1])) for turn in turns]


@pytest.mark.parametrize("turn", TURNS, ids=lambda turn: f"{turn[0]}: {turn[1]}")
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_agents_see_thoughts_with_their_tags_or_not_at_all(
    turn: tuple[Any, ...], finish: str, tokenizers: dict[str, Tokenizer]
) -> None:
    name, output, _, answer, *_ = turn
    tokenizer = tokenizers[name]
    prompt_ids = PromptMaker(make_config(tokenizer), tokenizer).make({"prompt": "6+6?"}, 0).token_ids
    message = make_choice(sampled(tokenizer, output, finish), Call(), tokenizer, "n", "hermes", prompt_ids).message
    literal = name.startswith(("tags", "a thought"))
    expected = output if literal else answer
    if "commentary" in output:
        expected = f"I add.\n{answer}"
    assert message["role"] == "assistant" and message["content"].rstrip(" ") == expected.rstrip(" ")


class Environment:
    """Keeps what it is given, and ends the episode."""

    tool_format = "hermes"

    def __init__(self) -> None:
        self.turns: list[tuple[str, str]] = []

    @asynccontextmanager
    async def _play(self) -> Any:
        yield self

    async def episode(self, alone: bool = False) -> Any:
        return self._play()

    async def reset(self, row: dict[str, Any]) -> str:
        return ""

    async def act(self, text: str, marked: str) -> Reply:
        self.turns.append((text, marked))
        return Reply([], 0.0, True, [], 0)

    async def finish(self) -> EpisodeOutcome:
        return EpisodeOutcome(None, {})


@pytest.mark.parametrize("name", ["tags that the prompt opens", "special tags", "magistral", "gpt-oss"])
def test_environments_get_the_whole_turn_and_the_text_that_programs_see(
    name: str, tokenizers: dict[str, Tokenizer]
) -> None:
    """A draft in a thought that the prompt has opened is none; steps of gpt-oss and its like are the answer alone."""
    tokenizer, environment = tokenizers[name], Environment()
    config = make_config(tokenizer)
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    opening, closing = {"magistral": ("[THINK]", "[/THINK]"), "gpt-oss": (ANALYSIS, f"{NEXT}{FINAL}")}.get(
        name, ("" if "opens" in name else "<think>", "</think>")
    )
    output = f"{opening}{call}{closing}12"

    async def generate(request: Any, min_version: int, shares: str) -> list[Completion]:
        return [sampled(tokenizer, output)]

    maker = PromptMaker(config, tokenizer)
    player = EpisodePlayer(config, SimpleNamespace(generate=generate), environment, maker, tokenizer)
    prompt = maker.make({"prompt": "6+6?"}, 0)
    (trajectory,) = asyncio.run(player.play(prompt, GenerateRequest("r", [], SamplingParameters(512)), 0))
    assert trajectory.turn.final_text == "12" and call in trajectory.turn.thought
    output = output.partition(closing)[0]  # a thought that is not closed
    asyncio.run(player.play(prompt, GenerateRequest("s", [], SamplingParameters(512)), 0))
    (text, _), (unclosed, _) = environment.turns
    assert (text, unclosed) == ((f"{output}{closing}12", output) if "opens" in name else ("12", ""))
    assert [parse_tool_calls(marked, "hermes")[1] for _, marked in environment.turns] == [[], []]


def test_a_stop_text_cuts_the_answer_and_not_the_thought(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["gpt-oss"]
    for output, text in (
        (f"{ANALYSIS}a STOP", ""),
        (f"{ANALYSIS}a{NEXT}{FINAL}b STOP", "b "),
    ):
        choice = make_choice(sampled(tokenizer, output), Call(stop=["STOP"]), tokenizer, "n", "harmony")
        assert (choice.message["content"], choice.stopped_by) == (text, "STOP")
