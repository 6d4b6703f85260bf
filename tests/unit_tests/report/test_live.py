"""The live page: who may see it, what it answers while the files grow, and what a browser makes of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, ClientTimeout, web
from aiohttp.test_utils import TestClient, TestServer

from tests.patience import PATIENCE_S
from tests.unit_tests.report.test_report import write_run
from torchtitan.errors import UserError
from torchtitan.report import live_server
from torchtitan.report.__main__ import main
from torchtitan.report.live_server import LivePage, LiveServer, listen
from torchtitan.report.metrics import ACTORS_FILE
from torchtitan.report.page import NO_DATA, page, write_report
from torchtitan.report.page_data import RunReader
from torchtitan.utils.json_lines import JsonLines, read_json_lines

TOKEN = "token-of-the-test"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
EVIL = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)


@contextlib.asynccontextmanager
async def client_of(run_dir: Path) -> AsyncIterator[TestClient[web.Request, web.Application]]:
    async with TestClient(TestServer(LiveServer(run_dir, TOKEN).app())) as client:
        yield client


def sample(step: int, **fields: Any) -> dict[str, Any]:
    row = {"step": step, "prompt": EVIL, "completion": f"a{EVIL}b", "reward": 1.0, "advantage": 0.5, "tokens": 3}
    row |= {"rewards": {"exact": 1.0}, "finish_reason": "stop"}
    row |= {"versions": [{"version": step, "tokens": 2}, {"version": step + 1, "tokens": 1}]}
    row |= {"token_texts": ["a", EVIL, "b"], "log_probs": [-0.5, -1.0, -2.0], "trainer_log_probs": [-0.5, -1.4, -1.0]}
    return row | fields


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_only_who_knows_the_token_is_let_in_and_only_by_a_name_of_this_machine(tmp_path: Path) -> None:
    async def check() -> None:
        async with client_of(write_run(tmp_path / "run", steps=3)) as client:
            for path in ("/", "/data", "/completions", "/metrics", "/nothing"):
                for wrong in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
                    assert (await client.get(path, headers=wrong)).status == 401
                assert (await client.get(path, params={"token": "wröng"})).status == 401
                for name in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", ""):
                    assert (await client.get(path, headers=BEARER | {"Host": name})).status == 403
            for name in ("127.0.0.1:1", "localhost:8080", "localhost", "[::1]:80", "[::1]"):
                assert (await client.get("/data", headers=BEARER | {"Host": name})).status == 200
            index = await client.get("/", params={"token": TOKEN})
            assert index.status == 200 and index.headers["Cache-Control"] == "no-store"
            assert await index.text() == page(NO_DATA)  # without the token
            policy = index.headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'none'") and "frame-ancestors 'none'" in policy
            assert (await client.post("/data", headers=BEARER)).status == 405

    asyncio.run(check())


def test_the_server_answers_with_data_when_they_are_new_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_server, "DATA_SECONDS", -1.0)
    run_dir = write_run(tmp_path / "run", steps=3)

    async def check() -> None:
        async with client_of(run_dir) as client:
            answer = await (await client.get("/data", headers=BEARER)).json()
            assert answer["data"] == RunReader(run_dir).read()
            known = {"known": answer["digest"]}
            assert (await client.get("/data", params=known, headers=BEARER)).status == 204
            assert sorted(path.name for path in run_dir.iterdir()) == before
            (run_dir / ACTORS_FILE).write_text('{"step": 4, "actors": {"actor-0": "ready v3"}}')
            newer = await (await client.get("/data", params=known, headers=BEARER)).json()
            assert newer["data"]["actors"]["lines"][0][:2] == ["actor-0", "ready v3"]

    before = sorted(path.name for path in run_dir.iterdir())
    asyncio.run(check())


def answer_of(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=PATIENCE_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_run_serves_its_page_from_another_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(tmp_path / "run", steps=3)
    with listen(0, "x") as free:
        port = free.getsockname()[1]
        with pytest.raises(UserError, match=rf"metrics.live_port = {port}: .* choose another port"):
            LivePage(run_dir, port)
    with caplog.at_level(logging.INFO):
        page = LivePage(run_dir, port)
    url = capsys.readouterr().err.strip().removeprefix("live page: ")
    assert caplog.messages == []  # others may read the log
    try:
        assert answer_of(url) == 200
        assert answer_of(url.partition("?")[0]) == 401
    finally:
        page.close()
        page.close()
    with pytest.raises(OSError):
        answer_of(url)
    assert (run_dir / "logs" / "live.log").read_text() == ""


@pytest.mark.slow
def test_the_page_ends_with_a_run_that_is_killed(tmp_path: Path) -> None:
    code = "import sys, time; from pathlib import Path; from torchtitan.report.live_server import LivePage\n"
    code += "page = LivePage(Path(sys.argv[1]), 0); time.sleep(1000)"
    command = [sys.executable, "-u", "-c", code, str(write_run(tmp_path / "run", steps=3))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        url = run.stderr.readline().removeprefix("live page: ").strip()
        assert answer_of(url) == 200
        run.kill()
    deadline = time.monotonic() + PATIENCE_S
    with pytest.raises(OSError):
        while time.monotonic() < deadline:
            answer_of(url)
            time.sleep(0.1)


@contextlib.contextmanager
def served(run_dir: Path) -> Iterator[str]:
    """The page of a finished run, by the command."""
    command = [sys.executable, "-m", "torchtitan.report", "--serve", str(run_dir), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().strip()
            server.send_signal(signal.SIGINT)
            assert server.wait(PATIENCE_S) == 0
        finally:
            server.kill()


def test_a_run_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--serve", str(tmp_path / "none")]) == 2
    assert "there is no run folder" in capsys.readouterr().err
    (tmp_path / "config.toml").touch()
    assert main(["--serve", str(tmp_path), "--port", "65536"]) == 1
    assert "--port = 65536: cannot listen on 127.0.0.1:65536" in capsys.readouterr().err


class Browser:
    """Headless Chromium by its debugging protocol."""

    def __init__(self, socket: Any):
        self._socket, self._number = socket, 0

    async def evaluate(self, script: str) -> Any:
        self._number += 1
        parameters = {"expression": script, "returnByValue": True, "awaitPromise": True}
        await self._socket.send_json({"id": self._number, "method": "Runtime.evaluate", "params": parameters})
        while (answer := await self._socket.receive_json()).get("id") != self._number:
            pass
        assert "exceptionDetails" not in answer["result"], answer
        return answer["result"]["result"].get("value")

    async def wait(self, script: str) -> None:
        """Until the script's value is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not await self.evaluate(script):
            assert time.monotonic() < deadline, (
                f"{script} did not come true: {await self.evaluate('document.body.innerText')}"
            )
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def browse(url: str, profile: Path, *options: str) -> AsyncIterator[Browser]:
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0",
        f"--user-data-dir={profile}", *options, url, stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        port_file, deadline = profile / "DevToolsActivePort", time.monotonic() + PATIENCE_S
        while not port_file.exists() or "\n" not in port_file.read_text():
            assert time.monotonic() < deadline and process.returncode is None, "Chromium did not start"
            await asyncio.sleep(0.1)
        port = port_file.read_text().split()[0]
        async with ClientSession(timeout=ClientTimeout(PATIENCE_S)) as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                (page,) = [target for target in await answer.json() if target["type"] == "page"]
            async with session.ws_connect(page["webSocketDebuggerUrl"]) as socket:
                yield Browser(socket)
    finally:
        # With all that it has started: what has this name may be a script around the browser.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_browser_draws_what_comes_and_runs_none_of_it(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", steps=30)
    (run_dir / ACTORS_FILE).write_text('{"step": 30, "actors": {"actor-0": "ready v29"}}')
    (run_dir / "completions.jsonl").unlink()
    with JsonLines(run_dir / "completions.jsonl") as file:
        for row in (sample(29), sample(30), sample(30, completion="tail", token_texts=[], log_probs=[])):
            file.write(row)

    async def check(url: str) -> None:
        async with browse(url, tmp_path / "profile") as browser:
            await browser.wait("document.querySelectorAll('#plots svg[role]').length === 6 && !!completion")
            assert await browser.evaluate("document.title") == "run"
            assert "step 30 of 4,000" in await browser.evaluate("byId('cards').innerText")
            assert await browser.evaluate("byId('prompt').textContent") == EVIL
            assert await browser.evaluate("byId('completion').textContent") == f"a{EVIL}b"
            assert EVIL in await browser.evaluate("byId('steps').textContent")
            assert await browser.evaluate("document.querySelectorAll('img, script').length") == 2
            assert "ready v29" in await browser.evaluate("byId('actors').innerText")
            assert "<script>alert(1)</script>" in await browser.evaluate("byId('events').textContent")
            assert "exact" in await browser.evaluate("byId('facts').innerText")
            colours = "[...byId('completion').children].slice(0, 3).map(part => part.style.backgroundColor).join(' ')"
            by_difference = await browser.evaluate(colours)
            assert by_difference == "rgba(36, 99, 180, 0) rgba(192, 57, 85, 0.8) rgba(36, 99, 180, 0.85)"
            await browser.evaluate("byId('colour').value = 'version'; byId('colour').onchange()")
            first, second, third = (await browser.evaluate(colours)).split(") ")
            assert first == second and third.removesuffix(")") != first
            # It goes on as the files do; a line that is not whole yet waits.
            rows = read_json_lines(run_dir / "metrics.jsonl")
            of_sources = {"step": 31, "reward/mean": 77, "reward/sums/mean": 80, "reward/right/mean": 80}
            of_sources |= {"groups/sums/trained": 3, "groups/game/trained": 1, "reward/game/mean": 68}
            append(run_dir / "metrics.jsonl", "\n" + json.dumps(rows[-2] | of_sources) + '\n{"st')
            append(run_dir / "completions.jsonl", json.dumps(sample(31, prompt="newest")) + "\n")
            await browser.wait("byId('cards').innerText.includes('step 31') && byId('prompt').textContent === 'newest'")
            by_source = (
                "[...document.querySelectorAll('#plots .plot')].find(box => box.innerText.includes('by source'))"
            )
            drawn = await browser.evaluate(f"{by_source}.innerText")
            assert "sums" in drawn and "game" in drawn and "right" not in drawn
            assert "1 to 4 of 4" in await browser.evaluate("byId('place').textContent")
            # The reader picks one, and it stays while others come; a search for what only one has finds that one.
            await browser.evaluate("byId('list').rows[3].click()")
            await browser.wait("byId('completion').textContent === 'tail'")
            append(run_dir / "completions.jsonl", json.dumps(sample(32, prompt="later")) + "\n")
            await browser.evaluate("byId('step_to').value = 29; byId('step_to').onchange()")
            await browser.wait("byId('list').rows.length === 2 && byId('facts').innerText.includes('29')")
            await browser.evaluate("byId('step_to').value = ''; byId('text').value = 'NEWEST'; byId('text').onchange()")
            await browser.wait("byId('list').rows.length === 2 && byId('prompt').textContent === 'newest'")
            assert await browser.evaluate("document.title") == "run"

    with served(run_dir) as url:
        asyncio.run(check(url))


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_browser_draws_a_report_from_its_file_within_the_width_of_a_phone(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", steps=30)
    wide = {f"a_reward_with_a_long_name_{number}": 1.0 for number in range(9)}
    rows = [sample(step, rewards=wide, completion="x" * 500) for step in (1, 15, 30)]
    (run_dir / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    state = "in a state " * 30
    (run_dir / ACTORS_FILE).write_text(json.dumps({"step": 30, "actors": {"actor-0": state}}))

    async def check() -> None:
        async with browse(write_report(run_dir).as_uri(), tmp_path / "profile", "--window-size=380,800") as browser:
            await browser.wait("document.querySelectorAll('#plots svg[role]').length === 6")
            await browser.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
            assert await browser.evaluate("document.querySelectorAll('.step').length") == 3
            # Its rows are old, and no event tells of an end.
            assert "the run waits, or it was killed" in await browser.evaluate("byId('outcome').innerText")
            assert "left" not in await browser.evaluate("byId('cards').innerText")
            assert await browser.evaluate("innerWidth <= 500 && document.documentElement.scrollWidth <= innerWidth")
            assert await browser.evaluate("document.title") == "run"

    asyncio.run(check())
