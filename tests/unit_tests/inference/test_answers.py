"""Answers of engines and teachers: read here or in the reader process they are the same; what is none costs nothing."""

from __future__ import annotations

import asyncio
import base64
import errno
import io
import json
import os
import signal
import subprocess
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from torchtitan.errors import EXIT_RETRYABLE, exit_code_of
from torchtitan.inference import answers
from torchtitan.inference.actor_client import ActorError, ActorNotReady, RequestRefused
from torchtitan.inference.answers import generated_bytes, scored_bytes
from torchtitan.inference.engines.reading import completions_of, scores_of
from torchtitan.inference.types import Completion, GenerateRequest, Routes, SamplingParameters, VersionSpan
from torchtitan.utils import reader_process, socket_child
from torchtitan.utils.reader_process import ReaderUnavailable, read_answer
from torchtitan.utils.typed_json import WrongForm

LAYERS, PER_TOKEN, VERSION = 3, 2, 41
Make = Callable[[list[Completion], int], Any]


def embedded(completions: list[Completion], prompt: int) -> Any:
    return {"completions": [completion.to_json() for completion in completions]}


def vllm(completions: list[Completion], prompt: int) -> Any:
    def choice(index: int, output: Completion) -> dict[str, Any]:
        rows = [
            {"token_id": token, "logprob": value, "rank": 1, "top_logprobs": []}
            for token, value in zip(output.token_ids, output.log_probs, strict=True)
        ]
        experts = None
        if output.routes is not None:
            file = io.BytesIO()
            np.save(file, output.routes.experts.astype(np.int64))
            experts = base64.b64encode(file.getvalue()).decode()
        return {
            "index": index, "finish_reason": output.finish_reason,
            "token_ids": output.token_ids, "logprobs": {"content": rows},
            "weight_versions": labels(output), "sampling_mask": output.kept_token_ids, "routed_experts": experts,
        }  # fmt: skip

    return {"request_id": "r", "choices": [choice(*pair) for pair in reversed(list(enumerate(completions)))]}


def sglang(completions: list[Completion], prompt: int) -> Any:
    def sample(out: Completion) -> dict[str, Any]:
        pair = out.token_ids, out.log_probs
        about: dict[str, Any] = {
            "finish_reason": {"type": out.finish_reason}, "weight_version": "e/1", "weight_versions": labels(out),
            "output_token_logprobs": [[value, token, None] for token, value in zip(*pair, strict=True)],
        }  # fmt: skip
        if out.kept_token_ids is not None:
            about |= {"output_token_sampling_logprobs": out.log_probs, "output_token_sampling_mask": out.kept_token_ids}
        if out.routes is not None:
            about["routed_experts"] = base64.b64encode(out.routes.experts.astype("<i4").tobytes()).decode()
        return {"output_ids": out.token_ids, "meta_info": about}

    return [sample(completion) for completion in completions]


def labels(completion: Completion) -> list[dict[str, Any]]:
    return [
        {"version": f"{span.epoch}/{span.version}", "start": span.start, "end": span.end} for span in completion.spans
    ]


ENGINES: dict[str, Make] = {"embedded": embedded, "vllm": vllm, "sglang": sglang}


def request(n: int, tokens: int, **sampling: Any) -> GenerateRequest:
    return GenerateRequest("r", [5, 6, 7], SamplingParameters(tokens, n, **sampling))


def longest(query: GenerateRequest, epoch: str = "1764374400-0123456789abcdef") -> list[Completion]:
    """As much as may come for a request: large numbers of tokens, log-probs with all of their digits."""
    generator, sampling = np.random.default_rng(0), query.sampling
    tokens = sampling.max_tokens
    made = []
    for _ in range(sampling.n):
        ids, log_probs = generator.integers(1 << 17, 1 << 18, tokens), -generator.random(tokens)
        kept = [[131071] * (place % 3) + [int(ids[place])] for place in range(tokens)] if sampling.truncated else None
        shape = (len(query.prompt_ids) + tokens - 1, LAYERS, PER_TOKEN)
        routes = Routes(0, generator.integers(0, 300, shape).astype(np.uint16)) if sampling.routes else None
        spans = [VersionSpan(epoch, VERSION + place, place, place + 1) for place in range(tokens)]
        made.append(Completion(ids.tolist(), log_probs.tolist(), "length", spans, kept, routes))
    return made


def pieces(data: bytes) -> list[bytes]:
    return [data[begin : begin + 1000] for begin in range(0, len(data), 1000)]


@pytest.mark.parametrize("where", ["here", "elsewhere"])
@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9}, {"routes": True}], ids=["plain", "truncated", "routes"])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_longest_honest_answer_is_read_whole(
    engine: str, sampling: dict[str, Any], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "elsewhere":
        monkeypatch.setattr(reader_process, "IN_PLACE_BYTES", 0)
    query = request(3, 100, **sampling)
    sent = longest(query)
    answer = json.dumps(ENGINES[engine](sent, len(query.prompt_ids))).encode()
    assert len(answer) <= generated_bytes(query, LAYERS * PER_TOKEN)
    for got, expected in zip(asyncio.run(completions_of(engine, query, pieces(answer))), sent, strict=True):
        assert (got.routes is None) == (expected.routes is None)
        if got.routes is not None and expected.routes is not None:
            shape = expected.routes.experts.shape
            assert np.array_equal(got.routes.experts.reshape(shape), expected.routes.experts)
        got.routes = expected.routes = None
        assert got == expected


def test_limits_follow_from_the_request() -> None:
    """Twice as much of anything that is asked for, and what comes with it, allows twice as much; nothing else does."""
    base_limit, two = generated_bytes(request(1, 1000)), generated_bytes(request(1, 2000))
    assert two - base_limit == 1000 * answers.TOKEN_BYTES and base_limit < 1 << 19
    assert generated_bytes(request(16, 32768)) < 1 << 28
    assert generated_bytes(request(2, 1000)) - base_limit == base_limit - answers.ANSWER_BYTES
    assert generated_bytes(request(1, 1000, top_p=0.9, top_k=2)) - base_limit == 2000 * answers.KEPT_BYTES
    assert generated_bytes(request(1, 1000, routes=True), 7) - base_limit == 1003 * 7 * answers.EXPERT_BYTES
    assert generated_bytes(request(1, 1000), 7) == base_limit
    assert generated_bytes(request(10**6, 10**6)) == answers.MAX_ANSWER_BYTES
    assert scored_bytes(200) - scored_bytes(100) == 100 * answers.TOKEN_BYTES


EMPTY = b"[]," * 80_000 + b"[]"
REFUSED = {
    "lists for completions": (b'{"completions":[%s]}', "object"),
    "lists for numbers": (b'{"completions":[{"token_ids":[%s]}]}', "int"),
    "lists that nobody reads": (b'{"x":[%s],"completions":[]}', "0 completions were returned"),
    "no JSON": (b'{"x":[%s', "truncated"),
    "no object": (b"[%s]", "object"),
    "too large a number": (b'{"completions":[{"token_ids":[9223372036854775808]}],"x":[%s]}', "int"),
    "no number": (b'{"completions":[{"token_ids":[1],"log_probs":[NaN]}],"x":[%s]}', "malformed"),
    "an infinite number": (b'{"completions":[{"token_ids":[1],"log_probs":[1e999]}],"x":[%s]}', "out of range"),
}


@pytest.mark.parametrize("where", ["here", "elsewhere"])
@pytest.mark.parametrize("kind", REFUSED)
def test_a_malformed_answer_is_refused_before_memory_is_allocated(
    kind: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, reason = REFUSED[kind]
    monkeypatch.setattr(reader_process, "IN_PLACE_BYTES", 0 if where == "elsewhere" else 1 << 20)
    data = template.replace(b"%s", EMPTY)

    async def read() -> None:
        await completions_of("embedded", request(1, 4), [data])

    tracemalloc.start()
    try:
        with pytest.raises(ActorError, match=reason):
            asyncio.run(read())
        # An empty list takes 56 bytes, and 8 in the list that it is in.
        assert tracemalloc.get_traced_memory()[1] < 2 * len(data)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_refused_answer_raises_the_error_of_its_cause(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if where == "elsewhere":
        monkeypatch.setattr(reader_process, "IN_PLACE_BYTES", 0)

    def read(engine: str, query: GenerateRequest, answer: Any) -> Any:
        return asyncio.run(completions_of(engine, query, [json.dumps(answer).encode()]))

    query = request(1, 2)
    (sent,) = longest(query)
    with pytest.raises(ActorError, match="3 tokens were returned, at most 2"):
        read("embedded", query, embedded(longest(request(1, 3)), 3))
    with pytest.raises(ActorNotReady, match="'default', which is not a version"):
        answer = vllm([sent], 3)
        answer["choices"][0]["weight_versions"] = [{"version": "default", "start": 0, "end": 2}]
        read("vllm", query, answer)
    with pytest.raises(RequestRefused, match="--return-sampling-mask"):
        read("vllm", request(1, 2, top_p=0.5), vllm([sent], 3))
    scores = b'{"log_probs":[-0.5,-1],"epoch":"e","version":3}'
    assert asyncio.run(scores_of("embedded", [1, 2, 3], [scores])).log_probs == [-0.5, -1.0]
    with pytest.raises(ActorError, match="2 log-probs were returned for 2 tokens"):
        asyncio.run(scores_of("embedded", [1, 2], [scores]))


def dies(_about: dict[str, Any], answer: bytes | memoryview) -> bytes:
    """A reading function that one answer ends the process of."""
    if bytes(answer) == b"poison":
        os._exit(1)
    return bytes(answer) * 2


def test_an_answer_may_break_the_reader_process_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_process, "IN_PLACE_BYTES", 0)

    def read(data: bytes) -> bytes:
        return bytes(asyncio.run(read_answer(f"{__name__}:dies", {}, [data[:1], data[1:]])))

    assert read(b"first") == b"firstfirst"
    with pytest.raises(WrongForm, match="the process that reads answers ended over it"):
        read(b"poison")
    assert read(b"next") == b"nextnext"


def _no_more_files(*_: object, **__: object) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize(
    ("module", "name", "broken", "reason"),
    [
        ("subprocess", "Popen", _no_more_files, "Too many open files"),
        ("socket", "socketpair", _no_more_files, "Too many open files"),
        ("sys", "executable", "/bin/false", "ulimit"),
    ],
)
def test_a_reader_that_does_not_start_is_not_the_fault_of_the_answer(
    module: str, name: str, broken: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes as an error that a restart of the run may cure, and passes with what has caused it."""
    monkeypatch.setattr(reader_process, "IN_PLACE_BYTES", 0)
    reader_process._reader.close()
    answer = json.dumps(embedded(longest(request(1, 2)), 3)).encode()

    def read() -> list[Completion]:
        return asyncio.run(completions_of("embedded", request(1, 2), [answer]))

    with monkeypatch.context() as here:
        here.setattr(socket_child, module, SimpleNamespace(DEVNULL=subprocess.DEVNULL))
        here.setattr(getattr(socket_child, module), name, broken, raising=False)
        with pytest.raises(ReaderUnavailable, match=reason) as caught:
            read()
    assert exit_code_of(caught.value) == EXIT_RETRYABLE
    assert read() == longest(request(1, 2))


def test_a_reader_that_was_stopped_or_killed_before_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_process, "IN_PLACE_BYTES", 0)
    reader = reader_process._reader
    answer = json.dumps(embedded(longest(request(1, 2)), 3)).encode()
    for number in (signal.SIGKILL, signal.SIGSTOP):
        asyncio.run(completions_of("embedded", request(1, 2), [answer]))
        child = reader._child
        assert child.process is not None and child.connection is not None
        child.connection.settimeout(0.1)  # only of this process
        os.kill(child.process.pid, number)
        assert asyncio.run(completions_of("embedded", request(1, 2), [answer])) == longest(request(1, 2))


def npy(header: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


FOREIGN = {
    "an archive": b"PK\x03\x04" + bytes(60),
    "nothing": b"",
    "a pickle": b"\x80\x04N.",
    "a shape of 8e13": npy(b"{'descr': '<i8', 'fortran_order': False, 'shape': (10000000000000,), }\n") + bytes(64),
    "a shape beyond numbers": npy(b"{'descr': '<i8', 'fortran_order': False, 'shape': (%d, 1, 1), }\n" % 10**30),
    "objects": npy(b"{'descr': '|O', 'fortran_order': False, 'shape': (1, 1, 1), }\n") + bytes(8),
    "a broken header": npy(b"{'descr': '<i8', (\n"),
    "half a header": b"\x93NUMPY\x01\x00\xff\x00{",
    "no numbers": npy(b"{'descr': '|V0', 'fortran_order': False, 'shape': (4, 3, 2), }\n"),
}


@pytest.mark.parametrize("where", ["here", "elsewhere"])
@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_bytes_for_experts_are_a_malformed_answer(
    kind: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "elsewhere":
        monkeypatch.setattr(reader_process, "IN_PLACE_BYTES", 0)
    query = request(1, 2, routes=True)
    answer = vllm(longest(query), 3)
    answer["choices"][0]["routed_experts"] = base64.b64encode(FOREIGN[kind]).decode()
    with pytest.raises(ActorError, match="malformed"):
        asyncio.run(completions_of("vllm", query, [json.dumps(answer).encode()]))


def raises(about: dict[str, Any], _answer: bytes | memoryview) -> bytes:
    """A reading function in which a library fails."""
    raise {"memory": MemoryError, "end": EOFError, "system": OSError}[about["how"]]("over it")


@pytest.mark.parametrize("where", ["here", "elsewhere"])
@pytest.mark.parametrize("how", ["memory", "end", "system"])
def test_an_exception_of_a_reading_function_refuses_the_answer(
    how: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_process, "IN_PLACE_BYTES", 0 if where == "elsewhere" else 1 << 20)
    with pytest.raises(WrongForm, match="Error: over it"):
        asyncio.run(read_answer(f"{__name__}:raises", {"how": how}, [b"answer"]))
