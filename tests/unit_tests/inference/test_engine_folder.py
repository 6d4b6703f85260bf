"""The folder for an engine's sockets: short, gone with the engine, at the latest when the next one starts."""

from __future__ import annotations

import fcntl
import importlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from tests.patience import PATIENCE_S
from torchtitan.inference import engine_folder as module
from torchtitan.inference.agent.engine import EngineOptions
from torchtitan.inference.engine_folder import PREFIX, engine_folder
from torchtitan.inference.sglang.engine import ENGINE as SGLANG
from torchtitan.inference.vllm.engine import ENGINE as VLLM

OWNER = """
import sys
from torchtitan.inference.engine_folder import engine_folder

with engine_folder() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short folder for temporary files, also of processes that are started."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def leave_socket(folder: Path) -> None:
    """As vLLM makes them; nobody unlinks it."""
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(folder / str(uuid.uuid4())))


def test_nothing_is_left_of_it(temporary: Path) -> None:
    with engine_folder() as folder, engine_folder() as other:
        assert folder != other and folder.parent == temporary and folder.stat().st_mode & 0o077 == 0
        leave_socket(folder)
    assert list(temporary.iterdir()) == []


def test_another_machines_folder_is_left_alone(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where temporary files are shared: its lock is not seen here."""
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    others = temporary / f"{importlib.reload(module).PREFIX}12345678"
    others.mkdir()
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with importlib.reload(module).engine_folder():
        assert others.is_dir() and len(list(temporary.iterdir())) == 2
    own = temporary / f"{module.PREFIX}12345678"
    own.mkdir()
    with module.engine_folder():
        assert others.is_dir() and not own.exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, None])
def test_what_a_killed_owner_has_left_goes_at_the_next_start(temporary: Path, how: int | None) -> None:
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
        assert folder.parent == Path("/tmp") and folder.name.startswith(PREFIX)
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
