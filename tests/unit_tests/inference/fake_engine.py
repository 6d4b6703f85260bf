"""An engine without a model, with the routes of SGLang that an agent and a handler use, for tests of both.

`fake_python(folder)` writes a program that an agent takes for the Python of SGLang's environment. A token takes
FAKE_TOKEN_S; its log-prob is minus the first element of model.norm.weight, so that answers show which weights made
them. Files in the folder that FAKE_ENGINE names change what it does:

    half_load   the next version is loaded by half, and the order fails
    hang_load   loading does not end while the file is there
    no_release  memory is not given back, and the order fails

As SGLang's scheduler it ends where it is to give memory back and has a request, to take memory that it has, or to
compute without. Weights that are given back are lost unless it was started with --enable-weights-cpu-backup. The file
`slept` gets a line for every order. It has a socket among the temporary files, too, and `socket` says where.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import os
import random
import socket
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from aiohttp import web

TOKEN_S = float(os.environ.get("FAKE_TOKEN_S", "0.002"))
LONGEST_LOAD_S = 30.0


def fake_python(folder: Path) -> Path:
    """The program; its engines look into `folder`."""
    program = folder / "python"
    program.write_text(
        f'#!/bin/sh\nFAKE_ENGINE="{folder}" exec "{sys.executable}" -m tests.unit_tests.inference.fake_engine "$@"\n'
    )
    program.chmod(0o755)
    return program


def flag(name: str, lower: bool = False) -> bool:
    """Whether the folder has that file; `lower` removes it."""
    path = Path(os.environ["FAKE_ENGINE"]) / name
    exists = path.exists()
    if exists and lower:
        path.unlink()
    return exists


def first_element(file: Path, name: str) -> float:
    """Of a float32 tensor in a safetensors file; without torch, whose import would take seconds in the middle."""
    data = file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    start = json.loads(data[8 : 8 + length])[name]["data_offsets"][0]
    value: float = struct.unpack_from("<f", data, 8 + length + start)[0]
    return value


class Guarded:
    """Lets in who knows the token."""

    def __init__(self, token: str):
        self.token = token

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if not hmac.compare_digest(request.headers.get("Authorization", ""), f"Bearer {self.token}"):
            return web.json_response({"error": "token"}, status=401)
        return await handler(request)


async def listen(app: web.Application, host: str, port_file: Path) -> None:
    """Serve, and say where."""
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, host, 0).start()
    partial = port_file.with_suffix(".tmp")
    partial.write_text(str(runner.addresses[0][1]))
    partial.replace(port_file)


class FakeEngine(Guarded):
    def __init__(self, token: str):
        super().__init__(token)
        self.label = "default"
        self.norms: tuple[float, float] = (0.0, 0.0)
        """First elements of the final norm and of the first layer's: equal in every whole version"""
        self.paused = False
        self.running: set[asyncio.Event] = set()
        self.asleep: set[str] = set()

    async def server_info(self, _request: web.Request) -> web.Response:
        answer = {"version": "0.0", "tp_size": 1, "disable_radix_cache": True}
        options = ("enable-memory-saver", "enable-weights-cpu-backup")
        return web.json_response({**answer, **{name.replace("-", "_"): f"--{name}" in sys.argv for name in options}})

    async def model_info(self, _request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def pause(self, request: web.Request) -> web.Response:
        await request.json()
        self.paused = True
        return web.json_response({"status": "ok"})

    async def resume(self, _request: web.Request) -> web.Response:
        self.paused = False
        return web.json_response({"status": "ok"})

    async def abort(self, _request: web.Request) -> web.Response:
        for aborted in self.running:
            aborted.set()
        return web.Response()

    async def flush(self, request: web.Request) -> web.Response:
        deadline = time.monotonic() + float(request.query["timeout"])
        while self.running and time.monotonic() < deadline:  # noqa: ASYNC110 (as SGLang's own loop)
            await asyncio.sleep(0.005)
        return web.Response(status=400 if self.running else 200)

    async def release(self, request: web.Request) -> web.Response:
        tags = (await request.json())["tags"]
        if flag("no_release"):
            return web.json_response({"error": {"message": "no"}}, status=400)
        self.must(not self.running and self.paused and not self.asleep & set(tags))
        self.asleep |= set(tags)
        if "weights" in tags and "--enable-weights-cpu-backup" not in sys.argv:
            self.norms = (float("nan"), float("nan"))
        self.note("release", tags)
        return web.json_response(None)

    async def take(self, request: web.Request) -> web.Response:
        tags = (await request.json())["tags"]
        self.must(set(tags) <= self.asleep)
        self.asleep -= set(tags)
        self.note("resume", tags)
        return web.json_response(None)

    def note(self, what: str, tags: list[str]) -> None:
        with (Path(os.environ["FAKE_ENGINE"]) / "slept").open("a") as file:
            file.write(f"{what} {' '.join(tags)}\n")

    @staticmethod
    def must(holds: bool) -> None:
        if not holds:
            print("fake engine: the scheduler ends", flush=True)
            os._exit(1)

    async def load(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.must("weights" not in self.asleep)
        assert self.paused and not body["flush_cache"]
        waited = 0.0
        while flag("hang_load") and waited < LONGEST_LOAD_S:
            await asyncio.sleep(0.05)
            waited += 0.05
        file = Path(body["model_path"]) / "model.safetensors"
        final, first = (first_element(file, f"model.{name}.weight") for name in ("norm", "layers.0.input_layernorm"))
        if flag("half_load", lower=True):
            self.norms = (final, self.norms[1])
            return web.json_response({"success": False, "message": "half of it"}, status=400)
        self.norms = (final, first)
        self.label = body["weight_version"]
        return web.json_response({"success": True, "message": ""})

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        many = isinstance(body["input_ids"][0], list)
        prompts = body["input_ids"] if many else [body["input_ids"]]
        wanted = body["sampling_params"] if many else [body["sampling_params"]]
        if any(13 in prompt for prompt in prompts):
            return web.json_response({"error": {"message": "a token out of the vocabulary"}}, status=400)
        answers = await asyncio.gather(*(self.sample(tokens, how) for tokens, how in zip(prompts, wanted, strict=True)))
        return web.json_response(answers if many else answers[0])

    async def sample(self, prompt: list[int], how: dict[str, Any]) -> dict[str, Any]:
        aborted = asyncio.Event()
        self.running.add(aborted)
        rows: list[list[Any]] = []
        spans: list[dict[str, Any]] = []
        try:
            while len(rows) < how["max_new_tokens"] and not aborted.is_set():
                await asyncio.sleep(TOKEN_S)
                if self.paused:
                    continue
                self.must(not self.asleep)
                assert self.norms[0] == self.norms[1] or self.label == "default", "served half a version"
                rows.append([-self.norms[0], random.randrange(20), None])
                if not spans or spans[-1]["version"] != self.label:
                    spans.append({"version": self.label, "start": len(rows) - 1, "end": len(rows)})
                spans[-1]["end"] = len(rows)
        finally:
            self.running.discard(aborted)
        return {
            "output_ids": [row[1] for row in rows],
            "meta_info": {
                "finish_reason": {"type": "abort" if aborted.is_set() else "length"},
                "weight_version": self.label,
                "weight_versions": spans,
                "output_token_logprobs": rows,
                "input_token_logprobs": [[None, prompt[0], None]]
                + [[-self.norms[0], token, None] for token in prompt[1:]],
            },
        }

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.guard])
        app.add_routes(
            [
                web.get("/server_info", self.server_info),
                web.get("/model_info", self.model_info),
                web.post("/pause_generation", self.pause),
                web.post("/continue_generation", self.resume),
                web.post("/abort_request", self.abort),
                web.post("/update_weights_from_disk", self.load),
                web.post("/flush_cache", self.flush),
                web.post("/release_memory_occupation", self.release),
                web.post("/resume_memory_occupation", self.take),
                web.post("/generate", self.generate),
            ]
        )
        return app


async def serve(arguments: argparse.Namespace) -> None:
    await listen(FakeEngine(os.environ[arguments.token_env]).app(), arguments.host, arguments.port_file)
    print("fake engine: listening", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    from torchtitan.utils.child_process import end_with_parent

    parser = argparse.ArgumentParser()
    parser.add_argument("-m", dest="module")
    parser.add_argument("--host")
    parser.add_argument("--port-file", type=Path)
    parser.add_argument("--token-env")
    parser.add_argument("--parent-pid", type=int)
    arguments, _ = parser.parse_known_args(sys.argv[1 : sys.argv.index("--")])
    (Path(os.environ["FAKE_ENGINE"]) / "pid").write_text(str(os.getpid()))
    end_with_parent(arguments.parent_pid, whole_group=True)
    listening = socket.socket(socket.AF_UNIX)
    place = tempfile.mktemp()
    listening.bind(place)
    (Path(os.environ["FAKE_ENGINE"]) / "socket").write_text(place)
    asyncio.run(serve(arguments))


if __name__ == "__main__":
    main()
