"""What is supervised lives again within a bound, and does not live on frozen; the registry's journal."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from torchtitan.utils.json_lines import JsonTail, older_file
from torchtitan.utils.machine import DESCRIPTORS
from torchtitan.weight_sync import main, servers
from torchtitan.weight_sync.registry.state import RegistrySettings
from torchtitan.weight_sync.servers import FROZEN_CHECKS, RegistryServer, ServerProcess, Supervised
from torchtitan.weight_sync.transports.disk import Disk
from torchtitan.weight_sync.transports.tcp import Tcp
from torchtitan.weight_sync.transports.transport import Transport
from torchtitan.weight_sync.wire.runtime import TOKEN_VARIABLE
from torchtitan.weight_sync.wire.sockets import SocketRuntime

LOOPBACK = "127.0.0.1"


class Lives(Supervised):
    """So many lives, none of which takes any time; the last one is closed."""

    def __init__(self, count: int, max_restarts: int):
        super().__init__("thing", (LOOPBACK, 0, max_restarts), int)
        self.left, self.lived, self.frozen_at = count, 0, list[int]()
        self.pauses: list[float] = []
        self._closing.wait = self.pauses.append  # type: ignore[assignment, method-assign]

    def _begin(self) -> None:
        self.left -= 1

    def _run(self) -> str:
        self.lived += 1
        if self.left == 0:
            self._closing.set()
        return "gone"

    def _end_frozen(self) -> None:
        self.frozen_at.append(self.checks)

    def play(self, pulses: list[int]) -> None:
        """Watch over a thing that says these at one look after the other."""
        self.checks, beats = -1, iter(pulses)
        self._closing.wait = lambda _seconds: self.checks + 1 == len(pulses)  # type: ignore[assignment, method-assign]

        def heartbeat() -> int:
            self.checks += 1
            return next(beats)

        self._heartbeat = heartbeat
        self._watch()


@pytest.mark.parametrize(
    ("healthy_s", "lived", "failure"),
    [(60.0, 4, "the thing failed 4 times in a row, the last time: gone"), (-1.0, 9, "")],
)
def test_restarts_in_a_row_are_bounded_and_earned_back(
    healthy_s: float, lived: int, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "HEALTHY_SECONDS", healthy_s)
    lives = Lives(count=8, max_restarts=3)
    lives._supervise()
    assert (lives.lived, lives.failure, lives.restarts) == (lived, failure, lived - 1)
    # The more often in a row, the longer before the next one.
    assert lives.pauses == [servers.RESTART_SECONDS * (number if failure else 0) for number in range(1, lived)]


def test_a_pulse_that_stands_still_is_a_frozen_life() -> None:
    lives = Lives(1, 0)
    # The first word is from before the first look.
    starting = lives.starting_checks = 10
    lives.play([0] * (starting + 1) + [1, 2, 2] + [2] * (2 * FROZEN_CHECKS - 1) + [3] * FROZEN_CHECKS)
    beaten = starting + 2
    assert lives.frozen_at == [starting, beaten + FROZEN_CHECKS, beaten + 2 * FROZEN_CHECKS]


def test_a_thread_that_hangs_when_it_was_told_to_end_is_a_failure_of_its_server() -> None:
    server: Any = object.__new__(servers.ShardServerThread)
    stops: list[int] = []
    server.runtime = SimpleNamespace(stop=lambda: stops.append(server.restarts))
    server.name, server.failure, server.restarts, server._stopped = "server", "", 0, -1
    for server.restarts in (0, 1):
        server._end_frozen()
        assert not server.failure, "it may end, and another one begin"
    server._end_frozen()
    assert stops == [0, 1] and "has to be started again" in server.failure


def test_a_process_hears_its_parent_alone_and_ends_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    (tmp_path / "stubborn.py").write_text(
        "import json, os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "number = json.loads(sys.argv[1])['term']\n"
        "print(json.dumps([number, os.getsid(0), os.environ.get('RANK')]), flush=True)\n"
        "time.sleep(600)"
    )
    monkeypatch.setattr(servers, "MODULE", "stubborn")
    log = tmp_path / "log"
    process = ServerProcess("thing", {}, {}, "token", log, (LOOPBACK, 0, 0), int)
    until(lambda: log.read_text().endswith("\n"))
    process.close(time.monotonic() + 0.2)
    assert json.loads(log.read_text()) == [1, process.process.pid, None] and process.process.pid != os.getsid(0)
    assert process.process.wait(PATIENCE_S) == -9 and not process.failure


@pytest.mark.parametrize(
    ("transport", "given"), [(Disk(), {"AWS_SECRET_ACCESS_KEY"}), (Tcp(), set[str]())], ids=["disk", "tcp"]
)
def test_a_process_has_the_users_keys_only_where_its_transport_needs_them(
    transport: Transport, given: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "TORCHTITAN_OTHER_TOKEN"}
    for key in keys:
        monkeypatch.setenv(key, "sesame")
    environments: list[dict[str, str]] = []

    def start(_command: Any, environment: dict[str, str], *_about: Any) -> subprocess.Popen[bytes]:
        environments.append(environment)
        return subprocess.Popen(["sleep", "600"])

    monkeypatch.setattr(servers, "start_beside", start)
    process = ServerProcess("thing", transport.to_json(), {}, "token", tmp_path / "log", (LOOPBACK, 0, 0), int)
    process.close(time.monotonic() + PATIENCE_S)
    (environment,) = environments
    assert keys & set(environment) == given and environment[TOKEN_VARIABLE] == "token"


def test_a_registry_whose_parent_was_killed_while_it_started_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This process takes the place of init, which gets the children of the dead.
    with subprocess.Popen(["true"]) as dead:
        monkeypatch.setattr(os, "getpid", lambda: dead.pid)
        registry = RegistryServer("e1", "token", RegistrySettings(1), tmp_path, (LOOPBACK, 0, 0), Tcp())
    try:
        until(lambda: registry.failure)
        assert "exit code 0" in registry.failure
        assert "the parent has ended" in (tmp_path / "registry.log").read_text()
    finally:
        registry.close(time.monotonic() + PATIENCE_S)


def test_a_server_may_open_as_many_files_as_the_machine_lets_it(tmp_path: Path) -> None:
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(most, DESCRIPTORS)
    # The new process begins with this limit, and this one has room for what it has open.
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted - 1, most))
    try:
        registry = RegistryServer("e1", "token", RegistrySettings(1), tmp_path, (LOOPBACK, 0, 0), Tcp())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
    try:
        until(lambda: registry._words.heartbeat, process=registry.process)
        assert resource.prlimit(registry.process.pid, resource.RLIMIT_NOFILE) == (wanted, most)
    finally:
        registry.close(time.monotonic() + PATIENCE_S)


class SlowJournal:
    """A journal on a disk that hangs with its first line until `works` is set, and its loop on a thread."""

    def __init__(self, path: Path):
        self.path, self.runtime, self.works = path, SocketRuntime(), threading.Event()
        self.journal = main.SyncJournal(self.runtime, path, term=1)
        hangs, file = threading.Event(), self.journal._file

        def slow_write(line: str) -> int:
            hangs.set()
            assert self.works.wait(PATIENCE_S)
            return file.write(line)

        self.journal._file = SimpleNamespace(write=slow_write)  # type: ignore[assignment]
        self._thread = threading.Thread(target=self.runtime.run)
        self._thread.start()
        self.write(0)
        assert hangs.wait(PATIENCE_S)

    def write(self, number: int) -> None:
        self.runtime.post(partial(self.journal.write, "line", {"number": number}))

    def end(self) -> None:
        """End the loop."""
        self.runtime.stop()
        self._thread.join(PATIENCE_S)

    def close(self) -> list[dict[str, Any]]:
        """What has been written."""
        self.journal.close(time.monotonic() + PATIENCE_S)
        return [json.loads(line) for line in self.path.read_text().splitlines()]


def test_lines_that_wait_for_a_slow_disk_are_written_at_the_end(tmp_path: Path) -> None:
    slow = SlowJournal(tmp_path / "journal.jsonl")
    for number in (1, 2):
        slow.write(number)
    until(lambda: slow.journal._waiting == 3)
    slow.end()
    threading.Timer(0.05, slow.works.set).start()
    assert [record["number"] for record in slow.close()] == [0, 1, 2]


def test_a_disk_that_hangs_costs_lines_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "MAXIMUM_WAITING", 4)
    slow = SlowJournal(tmp_path / "journal.jsonl")
    for number in range(1, 10):
        slow.write(number)
    until(lambda: slow.journal._lost == 6)
    slow.works.set()
    until(lambda: slow.journal._waiting == 0)
    slow.write(10)
    slow.end()
    records = slow.close()
    assert [record["number"] for record in records if record["event"] == "line"] == [0, 1, 2, 3, 10]
    assert [record["number"] for record in records if record.get("lost_lines") == 6] == [10]


def test_a_disk_that_hangs_again_keeps_no_more_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "MAXIMUM_WAITING", 2)
    waiting: list[Any] = []
    runtime: Any = SimpleNamespace(work=lambda _thread, _function, done: waiting.append(done))
    journal = main.SyncJournal(runtime, tmp_path / "journal.jsonl", term=1)
    for _ in range(3):
        journal.write("line", {})
    waiting.pop(0)(None, None)
    for _ in range(5):
        journal.write("line", {})
    assert journal._waiting == 2


def test_lines_that_come_while_some_are_written_are_written_together_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "GATHER_SECONDS", 0.0)
    queued: list[Any] = []
    runtime: Any = SimpleNamespace(work=lambda _thread, function, done: queued.append((function, done)))
    journal = main.SyncJournal(runtime, tmp_path / "journal.jsonl", term=1)
    written: list[list[int]] = []
    for number in range(4):
        journal.write("line", {"number": number})
    while queued:
        assert len(queued) == 1, "the thread gets more before it has done what it has"
        function, done = queued.pop()
        before = sum(map(len, written))
        function()
        lines = (tmp_path / "journal.jsonl").read_text().splitlines()[before:]
        written.append([json.loads(line)["number"] for line in lines])
        done(None, None)
    assert written == [[0], [1, 2, 3]] and journal._waiting == 0


@pytest.mark.parametrize("width", [1, 500])
def test_an_actor_causes_lines_of_a_bounded_length_and_those_left_out_are_counted(
    tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "GATHER_SECONDS", 0.0)  # each line is written for itself here
    now = [0.0]
    runtime: Any = SimpleNamespace(now=lambda: now[0], work=lambda _thread, function, done: done(function(), None))
    journal = main.SyncJournal(runtime, tmp_path / "journal.jsonl", term=1)
    for _ in range(5000):
        journal.write("poisoned", {"actor": "evil", "reason": "x" * width})
    journal.write("delivery", {"actor": "good"})
    now[0] = 10.0
    for _ in range(5000):
        journal.write("poisoned", {"actor": "evil", "reason": "x" * width})
    journal.write("publish", {"version": 1})
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    evil = [line for line in lines if line.get("actor") == "evil"]
    length = sum(len(json.dumps(line)) + 1 for line in evil)
    assert length <= main.BYTES_AT_ONCE + 10 * main.BYTES_PER_SECOND + 2 * 1000 and len(lines) == len(evil) + 2
    assert length > main.BYTES_AT_ONCE / 2
    assert sum(line.get("lost_lines", 0) for line in lines) == 10_000 - len(evil)


def test_a_journal_is_not_appended_to_the_remains_of_a_line(tmp_path: Path) -> None:
    """A registry that is killed while it writes leaves half a line, and the next one begins by saying so."""
    runtime: Any = SimpleNamespace(now=lambda: 0.0, work=lambda _thread, function, done: done(function(), None))
    path = tmp_path / "registry.jsonl"
    path.write_text('{"event": "publish", "version": 1}\n{"event": "publish", "vers')
    tail = JsonTail(path)
    assert [row["event"] for row in tail.read()] == ["publish"]
    main.SyncJournal(runtime, path, term=2).write("start", {"pid": 7})
    assert [(row["event"], row["term"]) for row in tail.read()] == [("start", 2)]


def test_a_full_journal_is_set_aside_and_readers_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "JOURNAL_BYTES", 2000)
    monkeypatch.setattr(main, "GATHER_SECONDS", 0.0)
    runtime: Any = SimpleNamespace(
        now=lambda: 0.0, work=lambda _thread, function, done: done(function(), None), finish_work=lambda *_: None
    )
    path = tmp_path / "registry.jsonl"
    journal, tail, read = main.SyncJournal(runtime, path, term=1), JsonTail(path), []
    for number in range(100):
        if number == 50:  # it is restarted
            journal.close(time.monotonic())
            journal = main.SyncJournal(runtime, path, term=2)
        journal.write("publish", {"version": number})
        if number % 7 == 0:
            read += [row["version"] for row in tail.read()]
    read += [row["version"] for row in tail.read()]
    assert read == list(range(100))
    assert path.stat().st_size <= 2000 and older_file(path).stat().st_size <= 2000
    # Whoever comes later has the newest ones, in order.
    late = [row["version"] for row in JsonTail(path).read()]
    assert late == list(range(late[0], 100)) and len(late) > 20
