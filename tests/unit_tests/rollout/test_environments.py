"""Environments in worker processes: the conventions that they follow, and that they cost an episode at most."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.patience import PATIENCE_S
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.rollout.conversation.tool_formats.format import WRONG
from torchtitan.rollout.environments.environment_pool import AgentPool, EnvironmentPool
from torchtitan.rollout.gateway.gateway_process import SessionAccess
from torchtitan.rollout.workers import isolation, seen_files
from torchtitan.rollout.workers.inside import QUOTES
from torchtitan.rollout.workers.worker_process import LOGGED_BYTES, CallFailed
from torchtitan.utils.json_lines import EventLog, read_json_lines

HERE = "tests.unit_tests.rollout.environment_examples"


def run(
    tmp_path: Path,
    work: Callable[[EnvironmentPool], Awaitable[Any]],
    factory: str = "",
    tools: tuple[str, ...] = (),
    parser: str = "hermes",
    isolate: Any = "auto",
) -> Any:
    """What `work` does with a pool of two workers."""
    config = JobConfig()
    config.rollout.max_completion_tokens = 100
    config.environment.factory = f"{HERE}:{factory}" if factory else ""
    config.environment.tool_parser = parser
    config.environment.tools = [f"{HERE}:{name}" for name in tools]
    config.environment.num_workers, config.environment.step_timeout_s = 2, 2.0
    config.environment.sandbox.memory_limit_mb, config.environment.sandbox.isolate = 512, isolate

    async def with_pool() -> Any:
        pool = EnvironmentPool(config, EventLog(tmp_path / "events.jsonl"), tmp_path / "environments.log")
        try:
            await pool.start()
            return await work(pool)
        finally:
            await pool.close()

    return asyncio.run(asyncio.wait_for(with_pool(), 120))


def events(tmp_path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_json_lines(tmp_path / "events.jsonl") if event["kind"] == kind]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_an_environments_processes_stay_for_its_next_episode(tmp_path: Path) -> None:
    """As a kernel, a browser or a shell; and the bytes of a row arrive as bytes."""

    async def work(pool: EnvironmentPool) -> Any:
        replies = []
        for _ in range(4):  # each of two workers has two
            async with await pool.episode() as episode:
                replies.append(
                    (await episode.reset({"image": b"\x89PNG"}), (await episode.act("bad")).messages[0]["content"])
                )
                await episode.finish()
        return replies

    assert run(tmp_path, work, "Kernel") == [("b'\\x89PNG'", "kernel: None")] * 4


def test_many_attributes_are_as_many_as_a_reply_may_have(tmp_path: Path) -> None:
    async def work(pool: EnvironmentPool) -> Any:
        async with await pool.episode() as episode:
            await episode.reset({})
            await episode.act("bad")
            return (await episode.finish()).attributes

    attributes = run(tmp_path, work, "Talkative")
    kept = [name for name in attributes if name.startswith("numbers")]
    assert len(kept) == 2 and all(len(attributes[name]) == 21_000 for name in kept)


def test_steps_of_many_episodes_side_by_side(tmp_path: Path) -> None:
    async def work(pool: EnvironmentPool) -> Any:
        async def play(number: int) -> Any:
            async with await pool.episode() as episode:
                observation = await episode.reset({"name": number})
                replies = [await episode.act(text) for text in (*"ab"[: number % 3], "end")]
                outcome = await episode.finish()
            assert observation == f"<{number}>" and [reply.done for reply in replies][-1:] == [True]
            assert [reply.messages[0]["content"] for reply in replies] == [str(i + 1) for i in range(len(replies))]
            assert outcome.reward == sum(reply.reward for reply in replies) == 0.5 * len(replies)
            return outcome.attributes

        return [await asyncio.gather(*(play(number) for number in range(50))) for _ in range(2)][1]

    attributes = run(tmp_path, work, "Counter")
    # What JSON can hold, and what is not private; instances are used again, not built for each of 100 episodes.
    assert attributes[4] == {"actions": ["a", "end"]}
    assert not events(tmp_path, "environment_failed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "failure", "word"),
    [
        ("Hangs", "timeout", "within 2 s"), ("HangsAsleep", "timeout", "within 2 s"),
        ("Raises", "exception", "RuntimeError: no such move"), ("Crashes", "crash", "exit code 3"),
        ("Eats", "exception", "MemoryError"), ("Stops", "exception", "StopIteration"),
        ("Cancels", "exception", "CancelledError: of its own"),
        ("NoText", "exception", "step returned object, which is not text"), ("Prints", None, ""), ("TooMuch", None, ""),
        ("Forks", None, ""),
    ],
)  # fmt: skip
def test_hostile_environments_cost_their_own_episode(
    tmp_path: Path, factory: str, failure: str | None, word: str
) -> None:
    async def work(pool: EnvironmentPool) -> Any:
        # Beside it, on both workers, others go on; a crash takes those of its own worker with it.
        others = [await pool.episode() for _ in range(3)]
        bad = await pool.episode()
        for episode in (*others, bad):
            await episode.reset({})
        reply, reason = None, None
        try:
            reply = await bad.act("bad")
        except CallFailed as error:
            reason = (error.kind, str(error))
        await bad.__aexit__()
        lost = 0
        for episode in others:
            try:
                await episode.act("end")
                await episode.finish()
            except CallFailed:
                lost += 1
            await episode.__aexit__()
        assert lost <= (failure == "crash")
        async with await pool.episode() as fresh:
            await fresh.reset({})
            assert (await fresh.act("end")).done
        return reply, reason, dict(pool.statistics)

    reply, reason, statistics = run(tmp_path, work, factory)
    failures = events(tmp_path, "environment_failed")
    # One, though a worker that ends takes another episode with it.
    assert len(failures) == bool(failure) <= statistics["failures"]
    if failure:
        assert reason[0] == failures[0]["what"] == failure and word in reason[1] and word in failures[0]["reason"]
    elif factory == "Prints":
        assert reply.messages[0]["content"] == "printed" and len(events(tmp_path, "environment_output_cut")) == 1
        assert (tmp_path / "environments.log").stat().st_size <= LOGGED_BYTES + 4096
    elif factory == "TooMuch":
        # Cut at what could be trained on in no case.
        assert 100 < len(reply.messages[0]["content"]) < 20_000
    else:
        assert reply.messages[0]["content"] == "the parent's"


def test_classes_of_other_libraries(tmp_path: Path) -> None:
    async def work(pool: EnvironmentPool) -> Any:
        async with await pool.episode() as episode:
            observation = await episode.reset({"seed": 7, "prompt": "x"})
            replies = [await episode.act(text) for text in ("go", "cut")]
            return observation, [(reply.messages[0]["content"], reply.reward, reply.done) for reply in replies]

    assert run(tmp_path, work, "Gym") == ("seed 7", [('{"seen": "go"}', 1.0, False), ('{"seen": "cut"}', 1.0, True)])
    assert run(tmp_path, work_of_one, "Remote") == ("hello", ("[1, 2]", 0.0, True))


@pytest.mark.parametrize(("action", "shown"), [("two", r"\('seen', 1.0\)"), ("text", "'false'")])
def test_a_step_of_a_wrong_type_is_refused_with_what_it_returned(tmp_path: Path, action: str, shown: str) -> None:
    async def work(pool: EnvironmentPool) -> None:
        for text in ("none", action):
            async with await pool.episode() as episode:
                await episode.reset({})
                assert not (await episode.act(text)).done

    with pytest.raises(CallFailed, match=f"step must return .*, it returned {shown}"):
        run(tmp_path, work, "Unfinished")


async def work_of_one(pool: EnvironmentPool) -> Any:
    async with await pool.episode() as episode:
        observation, reply = await episode.reset({}), await episode.act("go")
        return observation, (reply.messages[0]["content"], reply.reward, reply.done)


def test_tools_follow_trl(tmp_path: Path) -> None:
    async def work(pool: EnvironmentPool) -> Any:
        schemas = {tool["function"]["name"]: tool["function"] for tool in pool.tools}
        assert list(schemas) == ["buy", "look", "price", "weather"]
        assert schemas["buy"]["description"] == "Put something into the basket."
        assert schemas["buy"]["parameters"]["required"] == ["what"]
        assert schemas["buy"]["parameters"]["properties"]["pieces"]["description"] == "How many of it,"
        async with await pool.episode() as episode:
            assert await episode.reset({"function": "a column of any name"}) == ""
            results, ids = [], set[str]()
            for text in (
                f"I buy. {call('buy', what='egg', pieces='2')}{call('look')}",
                call("weather", city="Oslo") + call("price", function="egg"),
                call("weather", city="Atlantis"),
                call("buy", pieces=1),
                call("buy", what="egg", colour="red"),
                call("steal"),
                "<tool_call>{oops</tool_call>",
            ):
                reply = await episode.act(text)
                assert not reply.done
                results.append([message["content"] for message in reply.messages])
                ids |= {message["tool_call_id"] for message in reply.messages}
            assert len(ids) == sum(map(len, results))
            last = await episode.act("That is all.")
            assert last.done and not last.messages
            outcome = await episode.finish()
        assert (outcome.reward, outcome.attributes) == (2.0, {"basket": ["egg", "egg"]})
        assert (pool.statistics["tool_calls"], pool.statistics["tool_errors"]) == (8, 5)
        return results

    results = run(tmp_path, work, "Shop", ("weather",))
    assert results[:2] == [["2 things", '["egg", "egg"]'], ["sunny in Oslo", "egg: 3"]]
    words = ("it has sunk", "Field required", "Extra inputs", "there is no tool 'steal'", "in JSON")
    for (text,), word in zip(results[2:], words, strict=True):
        assert word in json.loads(text)["error"]


def test_functions_alone_are_tools(tmp_path: Path) -> None:
    async def work(pool: EnvironmentPool) -> Any:
        async with await pool.episode() as episode:
            await episode.reset({})
            reply = await episode.act(call("weather", city="Rome"))
            outcome = await episode.finish()
            return reply.messages, outcome.reward

    message = {"role": "tool", "tool_call_id": "000000000", "name": "weather", "content": "sunny in Rome"}
    assert run(tmp_path, work, tools=("weather",)) == ([message], None)


def test_of_two_calls_the_readable_one_runs_and_the_other_is_told(tmp_path: Path) -> None:
    async def work(pool: EnvironmentPool) -> Any:
        async with await pool.episode() as episode:
            await episode.reset({})
            reply = await episode.act("<tool_call>{oops</tool_call>" + call("weather", city="Rome"))
        return reply, pool.statistics["tool_errors"]

    reply, errors = run(tmp_path, work, tools=("weather",))
    first, second = (message["content"] for message in reply.messages)
    assert "must be" in json.loads(first)["error"] and second == "sunny in Rome"
    assert [tool_call["name"] for tool_call in reply.calls] == ["weather"] and errors == 1


@pytest.mark.parametrize("isolate", ["auto", False])
def test_a_tool_that_lacks_a_key_says_so_to_people_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolate: Any
) -> None:
    monkeypatch.setenv("WEATHER_KEY", "secret")

    async def work(pool: EnvironmentPool) -> Any:
        async with await pool.episode() as episode:
            await episode.reset({})
            return (await episode.act(call("forecast", city="Rome"))).messages[0]["content"]

    assert run(tmp_path, work, tools=("forecast",), isolate=isolate) == json.dumps({"error": "'WEATHER_KEY'"})
    (event,) = events(tmp_path, "environment_failed")
    assert 'environment.sandbox.variables = ["WEATHER_KEY"]' in event["reason"] and "secret" not in event["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["itself", "with its limit", "with its worker"])
def test_processes_of_an_agent_end_with_its_command(tmp_path: Path, ends: str) -> None:
    """Its reward is there when it has ended, though what it leaves behind holds its output open."""
    config, mark = JobConfig(), tmp_path / "pid"
    rest = {"itself": "echo 0.5", "with its limit": "wait", "with its worker": "kill -9 $PPID; wait"}[ends]
    config.environment.agent = f"bash -c 'sleep 1000 & echo $! > {mark}; {rest}'"
    config.environment.sandbox.isolate = False

    async def play() -> Any:
        pool = AgentPool(config, EventLog(tmp_path / "events.jsonl"))
        try:
            await pool.start()
            async with await pool.episode() as episode:
                return await episode.run(
                    {}, 0, SessionAccess("", "", ""), 2.0 if ends == "with its limit" else PATIENCE_S
                )
        except CallFailed as failure:
            return failure.kind
        finally:
            if ends != "with its worker":  # nor does it outlive its episode
                await until_process_is_gone()
            await pool.close()
            await until_process_is_gone()

    async def until_process_is_gone() -> None:
        pid, deadline = int(mark.read_text()), time.monotonic() + PATIENCE_S
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)

    expected = {"itself": 0.5, "with its limit": "timeout", "with its worker": "crash"}[ends]
    assert asyncio.run(asyncio.wait_for(play(), PATIENCE_S)) == expected


def test_a_failed_command_is_reported_with_its_last_words(tmp_path: Path) -> None:
    config, log_file = JobConfig(), tmp_path / "log"
    config.environment.agent = "bash -c 'echo {1..9999} >&2; echo Connection refused >&2; exit 3'"

    async def play() -> str:
        pool = AgentPool(config, EventLog(tmp_path / "events.jsonl"), log_file)
        try:
            await pool.start()
            async with await pool.episode() as episode:
                await episode.run({}, 0, SessionAccess("", "", ""), PATIENCE_S)
        except CallFailed as failure:
            return str(failure)
        finally:
            await pool.close()
        return ""

    message = asyncio.run(play())
    # What the command prints is no reason to advise a key of the isolation.
    assert f"bash ended with exit code 3{QUOTES}" in message and message.endswith(" 9999\nConnection refused")
    assert len(message) < 600 and "1 2 3" in log_file.read_text() and "Connection refused" in log_file.read_text()


def test_code_in_a_working_folder_that_isolation_hides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if all(isolation.problem_of(tool) for tool in isolation.NAMES):
        pytest.skip("nothing isolates processes here")
    monkeypatch.chdir(seen_files.SCRATCH[0])
    config = JobConfig()
    config.environment.agent = "lies_there:agent"
    pool = AgentPool(config, EventLog(tmp_path / "events.jsonl"))
    with pytest.raises(UserError, match="cannot see the working folder /tmp: start in another one"):
        asyncio.run(pool.start())


@pytest.mark.parametrize("leaves", ["after its end", "at once", "with a failure", "with the run"])
def test_instances_are_closed_once(tmp_path: Path, leaves: str) -> None:
    mark = tmp_path / "closed"

    async def work(pool: EnvironmentPool) -> None:
        episode = await pool.episode()
        await episode.reset({"mark": str(mark)})
        if leaves == "after its end":
            await episode.finish()
        if leaves == "with a failure":
            with pytest.raises(CallFailed):
                await episode.act("bad")
        if leaves != "with the run":
            await episode.__aexit__()

    run(tmp_path, work, "Closes", isolate=False)
    assert mark.read_text() == "closed"


def test_synchronous_agents_neither_wait_for_nor_end_with_others(tmp_path: Path) -> None:
    config = JobConfig()
    config.environment.agent = f"{HERE}:meets"

    async def play(pool: AgentPool, number: int) -> Any:
        async with await pool.episode() as episode:
            try:
                return await episode.run({"leaves": number == 7}, number, SessionAccess("", "", ""), 60.0)
            except CallFailed as error:
                return str(error)

    async def forty() -> list[Any]:
        pool = AgentPool(config, EventLog(tmp_path / "events.jsonl"))
        try:
            await pool.start()
            return await asyncio.gather(*(play(pool, number) for number in range(40)))
        finally:
            await pool.close()

    assert asyncio.run(forty()) == [1.0] * 7 + ["SystemExit: 3"] + [1.0] * 32


def test_an_awaitable_reward_of_an_agent_is_awaited(tmp_path: Path) -> None:
    config = JobConfig()
    config.environment.agent = f"{HERE}:wrapped"

    async def play() -> Any:
        pool = AgentPool(config, EventLog(tmp_path / "events.jsonl"))
        try:
            await pool.start()
            async with await pool.episode() as episode:
                return await episode.run({"number": 3}, 0, SessionAccess("", "", ""), PATIENCE_S)
        finally:
            await pool.close()

    assert asyncio.run(play()) == 1.5


def test_arguments_of_a_parser_that_json_cannot_hold_are_told_to_the_policy(tmp_path: Path) -> None:
    async def work(pool: EnvironmentPool) -> Any:
        async with await pool.episode() as episode:
            await episode.reset({})
            return await episode.act("1.5")

    reply = run(tmp_path, work, tools=("half",), parser=f"{HERE}:decimal_calls")
    assert json.loads(reply.messages[0]["content"]) == {"error": WRONG} and (reply.calls, reply.errors) == ([], 1)


def test_parser_that_is_an_async_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="async_calls': it must not be an async function"):
        run(tmp_path, work_of_one, tools=("half",), parser=f"{HERE}:async_calls")


@pytest.mark.parametrize(
    ("factory", "tools", "word"),
    [
        ("NoEnvironment", (), "neither step"),
        ("Nothing", (), "has no 'Nothing'"),
        ("", ("untyped",), "parameter city needs a type"),
        ("", ("undocumented",), "needs a docstring"),
        ("Counter", ("weather",), "cannot have tools"),
    ],
)
def test_an_environment_without_its_methods_is_refused(
    tmp_path: Path, factory: str, tools: tuple[str, ...], word: str
) -> None:
    with pytest.raises(UserError, match=word):
        run(tmp_path, work_of_one, factory, tools)
