"""The part of an engine's server that names the cache in which a request shares its beginning; and the folder for its
sockets: short, gone with the engine, at the latest when the next one starts."""

from __future__ import annotations

import asyncio
import fcntl
import importlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from tests.patience import PATIENCE_S, asynchronous
from torchtitan.inference.engines.sglang.engine import ENGINE as SGLANG
from torchtitan.inference.engines.sglang.serve import SGLangPrefixKeys
from torchtitan.inference.engines.sidecar.foreign_engine import EngineOptions
from torchtitan.inference.engines.vllm.engine import ENGINE as VLLM
from torchtitan.inference.engines.vllm.serve import VLLMPrefixKeys
from torchtitan.inference.serving import middleware as module
from torchtitan.inference.serving.middleware import FOLDER_PREFIX, PREFIX_KEYS, PrefixKeyMiddleware, engine_folder

Ask = Callable[..., Awaitable[tuple[int, Any]]]
OWNER = """
import sys
from torchtitan.inference.serving.middleware import engine_folder

with engine_folder() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


class Engine:
    """An ASGI application with the routes of an engine; generates nothing and says what it was asked."""

    def __init__(self, label_route: str):
        self.label, self.label_route, self.labels_asked = "e/0", label_route, 0
        self.asked: list[Any] = []
        self.meanwhile: Callable[[], Awaitable[None]] | None = None
        """What happens between its answer of a label and the arrival of that"""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive()).get("body", b"")
        answer: dict[str, Any] = {}
        if scope["path"] == self.label_route:
            assert scope["method"] == "GET"
            self.labels_asked += 1
            answer = {"weight_version": self.label}
            if (meanwhile := self.meanwhile) is not None:
                self.meanwhile = None
                await meanwhile()
        elif "generate" in scope["path"]:
            assert dict(scope["headers"])[b"content-length"] == str(len(body)).encode()
            self.asked.append(json.loads(body) if body[:1] == b"{" else body)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


def asking(application: Any) -> Ask:
    """Calls an ASGI application, with a body in several parts."""

    async def ask(method: str, path: str, body: bytes = b"", query: bytes = b"") -> tuple[int, Any]:
        parts = [body[:5], body[5:]]
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": method, "path": path, "query_string": query,
            "headers": [(b"content-length", str(len(body)).encode())],
        }  # fmt: skip
        await application(scope, receive, send)
        return sent[0]["status"], json.loads(sent[1]["body"])

    return ask


@pytest.mark.parametrize(
    ("middleware", "generate", "label", "pause", "resume"),
    [
        (VLLMPrefixKeys, "/inference/v1/generate", "/weight_info", "/pause", "/resume"),
        (SGLangPrefixKeys, "/generate", "/model_info", "/pause_generation", "/continue_generation"),
    ],
)
@asynchronous
async def test_requests_share_with_those_of_the_weights_that_answer_them(
    middleware: type[PrefixKeyMiddleware], generate: str, label: str, pause: str, resume: str
) -> None:
    engine = Engine(label)
    ask = asking(middleware(engine))
    body = json.dumps({"token_ids": list(range(100)), "cache_salt": "mine"}).encode()
    for _ in range(2):
        await ask("POST", generate, body)
    first, again = engine.asked
    assert first == again and first["token_ids"] == list(range(100))
    # vLLM's rule for such names.
    assert first["cache_salt"] != "mine" and first["cache_salt"].isalnum() and len(first["cache_salt"]) <= 128
    assert engine.labels_asked == 1

    await ask("POST", pause, query=b"mode=keep")
    waiting = asyncio.ensure_future(ask("POST", generate, body))
    await asyncio.sleep(0.05)
    assert not waiting.done() and len(engine.asked) == 2
    engine.label = "e/1"
    await ask("POST", resume)
    await waiting
    assert engine.asked[-1]["cache_salt"] not in ("mine", first["cache_salt"])

    second = engine.asked[-1]["cache_salt"]

    async def update() -> None:
        await ask("POST", pause, query=b"mode=keep")
        engine.label = "e/2"
        await ask("POST", resume)

    # The label that is asked for is that of weights which go before it arrives.
    await ask("POST", resume)
    engine.meanwhile = update
    await ask("POST", generate, body)
    third = engine.asked[-1]["cache_salt"]
    await ask("POST", generate, body)
    assert engine.asked[-1]["cache_salt"] == third and len({first["cache_salt"], second, third}) == 3

    # Requests may finish before an update: what comes meanwhile is the engine's to refuse.
    await ask("POST", pause, query=b"mode=wait") if pause == "/pause" else None
    await ask("POST", generate, b"no json")
    assert engine.asked[-1] == b"no json"
    assert (await ask("GET", PREFIX_KEYS))[0] == 200


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short folder for temporary files, also of processes that are started."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def leave_socket(folder: Path) -> None:
    """As vLLM makes them; nobody unlinks it."""
    with socket.socket(socket.AF_UNIX) as unix_socket:
        unix_socket.bind(str(folder / str(uuid.uuid4())))


def test_an_engines_folder_is_its_own_and_is_removed_with_the_sockets_that_the_engine_left(temporary: Path) -> None:
    with engine_folder() as folder, engine_folder() as other:
        assert folder != other and folder.parent == temporary and folder.stat().st_mode & 0o077 == 0
        leave_socket(folder)
    assert list(temporary.iterdir()) == []


def test_another_machines_folder_is_left_alone(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where temporary files are shared: its lock is not seen here."""
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    others = temporary / f"{importlib.reload(module).FOLDER_PREFIX}12345678"
    others.mkdir()
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with importlib.reload(module).engine_folder():
        assert others.is_dir() and len(list(temporary.iterdir())) == 2
    local_folder = temporary / f"{module.FOLDER_PREFIX}12345678"
    local_folder.mkdir()
    with module.engine_folder():
        assert others.is_dir() and not local_folder.exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, None])
def test_the_folder_of_a_killed_owner_is_removed_at_the_next_start(temporary: Path, how: int | None) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdin is not None and owner.stdout is not None
    left = Path(owner.stdout.readline().strip())
    leave_socket(left)
    with engine_folder():
        assert left.is_dir(), "its owner is alive"
    if how is None:
        owner.stdin.close()
    else:
        owner.send_signal(how)
    owner.wait(PATIENCE_S)
    assert left.is_dir() == (how is not None)
    (temporary / "somebody-elses").mkdir()
    with engine_folder() as folder:
        assert sorted(temporary.iterdir()) == sorted([folder, temporary / "somebody-elses"])
    owner.stdout.close()


@pytest.mark.parametrize("late", [False, True], ids=["before it is opened", "before it is locked"])
def test_a_folder_that_is_taken_away_at_once_is_made_anew(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    made: list[str] = []
    make, lock = tempfile.mkdtemp, fcntl.flock

    def make_and_lose(**arguments: str) -> str:
        made.append(make(**arguments))
        if not late and len(made) == 1:
            module._remove_ownerless(temporary)
        return made[-1]

    def lose_and_lock(descriptor: int, operation: int) -> None:
        if late and len(made) == 1:
            shutil.rmtree(made[0])
        lock(descriptor, operation)

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_lose)
    monkeypatch.setattr(fcntl, "flock", lose_and_lock)
    with engine_folder() as folder:
        assert len(made) == 2 and str(folder) == made[1] and folder.is_dir()


def test_a_long_path_for_temporary_files_is_not_taken(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = temporary / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with engine_folder() as folder:
        assert folder.parent == Path("/tmp") and folder.name.startswith(FOLDER_PREFIX)
        leave_socket(folder)


def test_engines_get_it_unless_somebody_has_said_where(monkeypatch: pytest.MonkeyPatch) -> None:
    options = EngineOptions("a", "m", "python", "agent", Path("/tmp/short/port"), "T", 1)
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert VLLM.command(options)[1]["VLLM_RPC_BASE_PATH"] == "/tmp/short"
    sglang = SGLANG.command(options)[1]
    assert sglang["TMPDIR"] == "/tmp/short"
    assert sglang["TORCHINDUCTOR_CACHE_DIR"] == default_cache_dir()
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/elsewhere")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/kept")
    assert "VLLM_RPC_BASE_PATH" not in VLLM.command(options)[1]
    assert SGLANG.command(options)[1]["TORCHINDUCTOR_CACHE_DIR"] == "/kept"
