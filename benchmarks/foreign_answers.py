"""What an actor, a teacher or a worker sends, and for how long it holds up the process that it is sent to.

Another thread of that process, as the trainer's is, looks at the clock all the time. `hold_ms`: the longest time in
which it got no turn while the process computed (parsing holds the interpreter's lock). `wait_more_ms`: the longest time
in which it got no turn at all beside a hostile answer (`wait_ms`), less that of the same time with an honest actor's
short answers alone (`wait_alone_ms`); `wait_honest_ms`: beside the longest honest answers. Every hostile answer has to
be refused, every honest one to be read; otherwise this fails.

    python benchmarks/foreign_answers.py --json
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from common import parser, report

from tests.trajectories import answer
from tests.unit_tests.rollout import test_worker_replies
from tests.unit_tests.rollout.test_worker_replies import FORGED
from torchtitan.config.job_config import JobConfig
from torchtitan.inference.actor_client import STATE_BYTES, ActorError
from torchtitan.inference.answers import generated_bytes
from torchtitan.inference.engines.embedded.client import EmbeddedClient
from torchtitan.inference.types import Completion, GenerateRequest, Routes, SamplingParameters, VersionSpan
from torchtitan.rollout.rewards.reward_pool import RewardPool
from torchtitan.rollout.types import Prompt

BARS = {"hold_ms": ("<=", 50.0), "wait_more_ms": ("<=", 50.0)}
LAYERS, EXPERTS = 48, 8
TIMEOUT_S, PIECE = 300.0, 1 << 20


def filled(template: bytes, unit: bytes, size: int) -> bytes:
    """The template with as many units in it as fit into `size` bytes."""
    return template.replace(b"%s", unit * ((size - len(template)) // len(unit) - 1) + unit.rstrip(b","))


def hostile(size: int) -> dict[str, bytes]:
    """Answers of about `size` bytes that no actor gives: each costs most in another place."""
    completion = b'{"completions":[{"token_ids":[1],"log_probs":[-1],"finish_reason":"stop","spans":[],%s}]}'
    return {
        "empty lists": filled(b'{"completions":[%s]}', b"[],", size),
        "empty objects": filled(b'{"completions":[%s]}', b"{},", size),
        "numbers": filled(b'{"completions":[{"token_ids":[%s]}]}', b"0,", size),
        "kept tokens": filled(completion.replace(b"%s", b'"kept_token_ids":[%s]'), b"[],", size),
        "unknown field": filled(b'{"x":[%s],"completions":[]}', b"[],", size),
        "unknown objects": filled(b'{"x":[%s],"completions":[]}', b'{"a":{}},', size),
        "nested": b'{"x":' + b"[" * (size - 10),
        "escapes": filled(b'{"x":"%s"}', rb"\u4e2d", size),
        "too long": b'{"completions":[' + b"[]," * (size // 2),
    }


def honest(request: GenerateRequest) -> bytes:
    """The longest answer that the embedded engine gives to this request."""
    generator, sampling, made = np.random.default_rng(0), request.sampling, []
    for _ in range(sampling.n):
        ids, log_probs = generator.integers(0, 1 << 18, sampling.max_tokens), -generator.random(sampling.max_tokens)
        shape = (len(request.prompt_ids) + sampling.max_tokens - 1, LAYERS, EXPERTS)
        routes = Routes(0, generator.integers(0, 128, shape).astype(np.uint8)) if sampling.routes else None
        spans = [VersionSpan("1764374400-0123456789abcdef", 7, 0, sampling.max_tokens)]
        made.append(Completion(ids.tolist(), log_probs.tolist(), "length", spans, None, routes))
    return json.dumps({"completions": [completion.to_json() for completion in made]}, separators=(",", ":")).encode()


def serve(answers: Connection) -> None:
    """Answer every request with the bytes that were last sent; says the port first."""
    body = b""

    async def answer_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if lengths:
            await reader.readexactly(int(lengths[0].partition(b":")[2]))
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body))
        try:
            for begin in range(0, len(body), PIECE):
                writer.write(body[begin : begin + PIECE])
                await writer.drain()
            writer.close()
        except ConnectionError:
            pass  # it has been refused

    async def run() -> None:
        nonlocal body
        server = await asyncio.start_server(answer_request, "127.0.0.1", 0)
        answers.send(server.sockets[0].getsockname()[1])
        while (got := await asyncio.to_thread(answers.recv_bytes)) != b"":
            body = got
            answers.send(True)

    asyncio.run(run())


class Watch:
    """Another thread of this process. longest: its longest time without a turn; held: without one while the process
    computed, in seconds."""

    def __init__(self) -> None:
        self.longest = self.held = 0.0
        self._stopped = False
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def take(self) -> tuple[float, float]:
        """Return (longest, held) since the last call, in milliseconds."""
        found = 1e3 * self.longest, 1e3 * self.held
        self.longest = self.held = 0.0
        return found

    def close(self) -> None:
        self._stopped = True
        self._thread.join()

    def _look(self) -> None:
        clock, computed = time.perf_counter(), time.process_time()
        while not self._stopped:
            time.sleep(5e-4)
            now, used = time.perf_counter(), time.process_time()
            self.longest = max(self.longest, now - clock)
            self.held = max(self.held, min(now - clock, used - computed))
            clock, computed = now, used


async def refused(call: Awaitable[Any]) -> str:
    """Return why a call was refused. Raises AssertionError if it was not."""
    try:
        got = await call
    except ActorError as error:
        return str(error)
    raise AssertionError(f"this was taken for an answer: {str(got)[:200]}")


async def measure(quick: bool) -> tuple[dict[str, float], dict[str, Any]]:
    ours, server_end = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(server_end,), daemon=True)
    process.start()
    client = EmbeddedClient(f"http://127.0.0.1:{ours.recv()}", "", LAYERS * EXPERTS)
    n, tokens = (2, 1024) if quick else (16, 32768)
    plain = GenerateRequest("r", [1] * 8, SamplingParameters(tokens, n))
    routed = GenerateRequest("r", [1] * 8, SamplingParameters(tokens, n, routes=True))
    short = GenerateRequest("r", [1] * 8, SamplingParameters(16, 1))
    rows: dict[str, tuple[float, float, str]] = {}
    # What Python's collector takes for the program's own objects no answer causes.
    gc.collect()
    gc.freeze()
    watch = Watch()

    def answering(body: bytes) -> None:
        ours.send_bytes(body)
        ours.recv()
        watch.take()

    async def case(name: str, work: Callable[[], Awaitable[str]]) -> None:
        outcome = await work()
        wait, held = watch.take()
        rows[name] = wait, held, outcome
        print(f"{name:36} wait {wait:8.1f} ms  hold {held:6.1f} ms  {outcome[:80]}", flush=True)

    async def generated(request: GenerateRequest) -> str:
        return f"{len(await client.generate(request, TIMEOUT_S))} completions"

    answering(honest(plain))
    await client.generate(plain, TIMEOUT_S)  # the reader process is there now
    answering(honest(short))

    async def alone() -> str:
        end = time.monotonic() + (1 if quick else 20)
        while time.monotonic() < end:
            await client.generate(short, TIMEOUT_S)
        return "short honest answers"

    await case("alone", alone)
    for name, request in (("honest", plain), ("honest with routes", routed)):
        answering(honest(request))
        await case(name, lambda request=request: generated(request))
    for name, body in hostile(min(generated_bytes(plain), (1 << 20) if quick else 60_000_000)).items():
        answering(body)
        await case(f"actor: {name}", lambda: refused(client.generate(plain, TIMEOUT_S)))
    for name, body in hostile(250_000).items():
        answering(body)
        await case(f"actor, short: {name}", lambda: refused(client.generate(plain, TIMEOUT_S)))
    for name, body in hostile(STATE_BYTES - 64).items():
        answering(body)
        await case(f"health: {name}", lambda: refused(client.health(TIMEOUT_S)))
    await client.close()
    ours.send_bytes(b"")
    process.kill()

    config = JobConfig()
    config.rewards.functions, config.rewards.num_workers = [f"{test_worker_replies.__name__}:forger"], 1
    pool = RewardPool(config)
    await pool.start()
    for kind in FORGED:
        watch.take()

        async def forged(kind: str = kind) -> str:
            ((total, _),) = await pool.score(Prompt(0, "", [1], {}), [answer([1, 7], kind)])
            assert total is None, f"{kind}: the forged reply gave {total}"
            return pool.last_failure.partition(": ")[2]

        await case(f"worker: {kind}", forged)
        await pool.score(Prompt(0, "", [1], {}), [answer([1, 7], "honest")])  # starts the next worker
    await pool.close()
    watch.close()
    waits = {name: row[0] for name, row in rows.items()}
    waited_alone = waits.pop("alone")
    waited_honest = max(waits.pop(name) for name in ("honest", "honest with routes"))
    worst = max(waits, key=lambda name: waits[name])
    figures = {
        "hold_ms": max(row[1] for row in rows.values()),
        "wait_more_ms": max(0.0, waits[worst] - waited_alone),
        "wait_alone_ms": waited_alone,
        "wait_ms": waits[worst],
        "wait_honest_ms": waited_honest,
    }
    return figures, {"longest wait": worst, "answers": len(rows), "tokens": n * tokens}


def main() -> int:
    arguments = parser(__doc__).parse_args()
    figures, conditions = asyncio.run(measure(arguments.quick))
    report("foreign_answers", figures, BARS, conditions, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
