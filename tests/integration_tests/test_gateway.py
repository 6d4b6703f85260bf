"""Programs that speak the OpenAI API against the gateway, with the real engine and the real weight path behind it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.chat_models import END, QUESTION, make_chat_model
from tests.engines.job import differences
from tests.gateways import MAX_CALLS, Behind, client, make_config, play_both_ways, playing
from tests.integration_tests.recording_actor import RECORD
from tests.patience import asynchronous, eventually
from tests.processes import started_by
from tests.roundings import forward_rounding
from torchtitan.inference.pool import actor_process
from torchtitan.inference.types import Branch
from torchtitan.models.hf_checkpoint import load_policy
from torchtitan.rollout.gateway.gateway_process import GatewayLost, SessionAccess
from torchtitan.rollout.gateway.record import SessionRecord

openai = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("models") / "chat")


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which the actors note what they sample."""
    real = actor_process.actor_command

    def command(*arguments: Any) -> list[str]:
        replaced = {"torchtitan.inference.engines.embedded": "tests.integration_tests.recording_actor"}
        return [replaced.get(part, part) for part in real(*arguments)]

    monkeypatch.setattr(actor_process, "actor_command", command)
    monkeypatch.setenv(RECORD, str(tmp_path / "record.jsonl"))
    return tmp_path / "record.jsonl"


def pairs(branches: list[Branch]) -> list[tuple[list[int], list[int]]]:
    """(prompt, sampled tokens) of every call that the branches hold."""
    found = []
    for branch in branches:
        prefix: list[int] = []
        for segment in branch.segments:
            if segment in branch.sampled:
                found.append((list(prefix), segment.token_ids))
            prefix += segment.token_ids
    return found


@asynchronous
async def test_an_openai_client_plays_with_tools(model: Path, record: Path, tmp_path: Path) -> None:
    async with playing(make_config(model), tmp_path / "run", END) as behind:
        async for branch in play_both_ways(behind):
            assert pairs([branch]) == behind.sampled(record)[-2:]
        # The tools' access for agents that sample tokens themselves, whatever form of entry they read.
        access = await behind.open("many", temperature=0.0, many=True)
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {access.key}"}) as http:
            async with http.get(f"{access.base_url}/models") as response:
                assert (await response.json())["data"][0]["max_model_len"] == 1024
            prompt = branch.segments[0].token_ids
            body = {"model": "chat", "token_ids": prompt, "sampling_params": {"max_tokens": 4, "logprobs": 1}}
            url = f"{behind.gateway.url}/inference/v1/generate"
            async with http.post(url, json=body) as response:
                assert response.status == 400 and "X-Session-ID" in await response.text()
            async with http.post(url, json=body, headers={"X-Session-ID": "trace"}) as response:
                (choice,) = (await response.json())["choices"]
        expected = branch.sampled[0].token_ids[:4]
        entries = choice["logprobs"]["content"]
        assert choice["token_ids"] == expected == [entry["token_id"] for entry in entries]
        assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in expected]
        played = await behind.gateway.end("many")
        assert played.branches[0].sampled[0].token_ids == expected and played.truncated


@asynchronous
async def test_every_token_is_one_that_the_engine_sampled(model: Path, record: Path, tmp_path: Path) -> None:
    """Many episodes at a time, with versions and the death of an actor in between; programs that rewrite histories and
    hear names of special tokens."""
    config = make_config(model, num_actors=2, in_flight_kv="recompute")
    config.rollout.max_completion_tokens = 24
    config.rollout.temperature = 1.5

    async def episode(behind: Behind, number: int) -> SessionRecord:
        generator = random.Random(number)
        access = await behind.open(f"e{number}", seed=number, shares=f"group-{number // 4}")
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"Question {number // 4} <|im_end|>"}]
        async with client(access) as api:
            for turn in range(8):
                answer = await api.chat.completions.create(model="chat", messages=messages)
                reply = answer.choices[0].message.model_dump()
                more = generator.choice(["<|im_start|>user\nx", "🙂é\u200d", "</tool_call>", "a\n\n b", ""])
                messages += [reply, {"role": "user", "content": more}]
                if turn == 4 and number % 4 == 0:
                    messages[1] = {"role": "assistant", "content": "(something)"}
        return await behind.gateway.end(access.session)

    async with playing(config, tmp_path / "run", END) as behind:
        await eventually(lambda: list(behind.pool.actors.values()).count("ready") == 2)
        episodes = [asyncio.create_task(episode(behind, number)) for number in range(24)]
        await eventually(lambda: record.exists() and len(record.read_text().splitlines()) > 40)
        behind.trainer.publish()
        await eventually(lambda: len(record.read_text().splitlines()) > 90)
        (await frozen_at_work(behind.pool._actors)).kill()
        behind.trainer.publish()
        played = await asyncio.gather(*episodes)
        sampled = {(tuple(prompt), tuple(tokens)) for prompt, tokens in behind.sampled(record)}
        redone = behind.pool.statistics["requests_redone"]
    assert redone > 0
    versions = set()
    for number, session in enumerate(played):
        assert (session.calls, session.failed) == (8, 0)
        assert len(session.branches) == (2 if number % 4 == 0 else 1)
        got = pairs(session.branches)
        assert len(got) == 8 and all((tuple(prompt), tuple(tokens)) in sampled for prompt, tokens in got)
        for branch in session.branches:
            for completion in branch.sampled:
                assert [span.start for span in completion.spans][:1] == [0]
                versions |= {span.version for span in completion.spans}
            # Under "recompute", tokens of one version are those of its weights alone.
            ids, end = branch.token_ids, 0
            for segment in branch.segments:
                end += len(segment.token_ids)
                if segment in branch.sampled and len(segment.spans) == 1 and number % 6 == 0:
                    logits = behind_logits(behind, ids[:end], segment.spans[0].version)
                    begin = end - len(segment.token_ids)
                    rows = (logits[begin - 1 : end - 1] / 1.5).log_softmax(-1)
                    expected = rows[range(len(segment.token_ids)), segment.token_ids].tolist()
                    largest = float(logits.abs().max())
                    assert differences(segment.log_probs, expected) < forward_rounding(load_policy(model).args, largest)
    assert versions == {0, 1, 2}


async def frozen_at_work(actors: Sequence[Any]) -> psutil.Process:
    """The process of one that is at work, frozen with requests that it has not answered: the first to have any, since
    the last ones may have gone to another."""
    for _ in range(100):
        actor = await eventually(lambda: next((actor for actor in actors if actor.load > 0), None))
        process = psutil.Process(actor._process.pid)
        process.suspend()
        await asyncio.sleep(0.05)  # answers that were on their way
        if actor.load > 0:
            return process
        process.resume()
    raise AssertionError("they always had answered everything")


def behind_logits(behind: Behind, ids: list[int], version: int) -> Any:
    """What transformers computes with a version's weights."""
    import copy

    import torch

    trainer = behind.trainer
    if not hasattr(trainer, "versions"):
        import transformers

        first = transformers.AutoModelForCausalLM.from_pretrained(behind.gateway._settings["model"]).eval()
        trainer.versions = [first]  # type: ignore[attr-defined]
        current_model = trainer.model
        for number in range(1, trainer.version + 1):
            trainer.model = copy.deepcopy(trainer.versions[-1])  # type: ignore[attr-defined]
            trainer.change(number)
            trainer.versions.append(trainer.model)  # type: ignore[attr-defined]
        trainer.model = current_model
    with torch.no_grad():
        return trainer.versions[version](torch.tensor([ids])).logits[0].float()  # type: ignore[attr-defined]


@asynchronous
async def test_what_goes_wrong_is_said_and_told_apart(model: Path, tmp_path: Path) -> None:
    config = make_config(model, max_retries=0)
    config.training.seq_len = 200
    question: dict[str, Any] = {"model": "chat", "messages": [{"role": "user", "content": QUESTION}]}
    async with playing(config, tmp_path / "run", END) as behind:
        # Programs' mistakes are theirs.
        access = await behind.open("mistakes")
        async with client(access) as api:
            for wrong in ({"n": 0}, {"logit_bias": {"5": 1}}, {"tool_choice": "required"}, {"messages": []}):
                with pytest.raises(openai.BadRequestError):
                    await api.chat.completions.create(**{**question, **wrong})
            with pytest.raises(openai.NotFoundError, match="/v1/embeddings is not served here: .*/v1/chat/completions"):
                await api.embeddings.create(model="chat", input=QUESTION)
            long = [{"role": "user", "content": "x" * 300}]
            with pytest.raises(openai.BadRequestError, match="200"):
                await api.chat.completions.create(model="chat", messages=long)
            for _ in range(MAX_CALLS):
                await api.chat.completions.create(**question, max_tokens=1)
            with pytest.raises(openai.RateLimitError):
                await api.chat.completions.create(**question)
        with pytest.raises(openai.AuthenticationError):
            await client(SessionAccess("", access.base_url, "guessed")).chat.completions.create(**question)
        played = await behind.gateway.end("mistakes")
        assert (played.calls, played.failed, played.truncated) == (MAX_CALLS, 0, True)

        # An episode that is over, twice: one event.
        for _ in range(2):
            with pytest.raises(openai.APIStatusError, match="has ended") as failure:
                await client(access).chat.completions.create(**question)
            assert failure.value.status_code == 410
        (event,) = behind.events("call_after_end")
        assert event["session"] == "mistakes"

        # The engine's fault is no play, and none once the same call has been answered.
        access = await behind.open("faults")
        for actor in behind.pool._actors:
            psutil.Process(actor._process.pid).suspend()  # type: ignore[union-attr]
        refused = asyncio.create_task(client(access).chat.completions.create(**question))
        await asyncio.sleep(0.5)
        psutil.Process(behind.pool._actors[0]._process.pid).kill()  # type: ignore[union-attr]
        with pytest.raises(openai.InternalServerError, match="could not answer"):
            await refused
        again = await behind.open("again")
        assert (await client(again).chat.completions.create(**question)).choices[0].message.content
        assert (await behind.gateway.end("faults")).failed == 1

        # The gateway itself.
        (child,) = started_by(psutil.Process(), "torchtitan.rollout.gateway.server")
        child.kill()
        with pytest.raises(GatewayLost):
            await behind.gateway.end("again")
        await eventually(lambda: behind.events("gateway_ended"))
        access = await behind.open("anew")
        await client(access).chat.completions.create(**question)
        assert (await behind.gateway.end("anew")).calls == 1 and behind.gateway.statistics["starts"] == 2
