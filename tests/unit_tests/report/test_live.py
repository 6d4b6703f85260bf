"""The live page: who may see it, what it answers while the files grow, and what a browser makes of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
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
from torchtitan.report import page
from torchtitan.report.__main__ import main
from torchtitan.report.metrics import ACTORS_FILE, cut_after
from torchtitan.report.page import LivePage, LiveServer, listen
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
            for path in ("/", "/run", "/report", "/lines/metrics?after=0", "/completions", "/metrics", "/nothing"):
                for wrong in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
                    assert (await client.get(path, headers=wrong)).status == 401
                assert (await client.get(path, params={"token": "wröng"})).status == 401
                for name in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", ""):
                    assert (await client.get(path, headers=BEARER | {"Host": name})).status == 403
            for name in ("127.0.0.1:1", "localhost:8080", "localhost", "[::1]:80", "[::1]"):
                assert (await client.get("/run", headers=BEARER | {"Host": name})).status == 200
            page = await client.get("/", params={"token": TOKEN})
            assert page.status == 200 and page.headers["Cache-Control"] == "no-store"
            assert TOKEN not in await page.text()
            assert (await client.post("/run", headers=BEARER)).status == 405

    asyncio.run(check())


@pytest.mark.slow
def test_pages_need_no_network_and_run_no_text_of_a_model(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", steps=3)
    append(run_dir / "completions.jsonl", json.dumps(sample(3)) + "\n")

    async def check() -> None:
        async with client_of(run_dir) as client:
            page, other = [await client.get("/", headers=BEARER) for _ in range(2)]
            text, policy = await page.text(), page.headers["Content-Security-Policy"]
            (nonce,) = set(re.findall(r'nonce="([^"]+)"', text))
            assert "default-src 'none'" in policy and f"script-src 'nonce-{nonce}';" in policy
            assert policy != other.headers["Content-Security-Policy"] and "unsafe" not in policy
            assert not re.search(r"""(src|href)=["']?(https?:)?//|innerHTML|@import""", text)
            report = await client.get("/report", headers=BEARER)
            assert report.headers["Content-Security-Policy"].startswith("default-src 'none'")
            assert "<script" not in await report.text() and "&lt;script&gt;document" in await report.text()
        assert sorted(path.name for path in run_dir.iterdir()) == before

    before = sorted(path.name for path in run_dir.iterdir())  # the server only reads
    asyncio.run(check())


def test_whole_lines_as_the_files_grow_and_are_cut(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    path = run_dir / "metrics.jsonl"

    async def check() -> None:
        async with client_of(run_dir) as client:
            known = {"file": 0, "end": 0}

            async def more() -> list[str]:
                query = {"file": known["file"], "after": known["end"]}
                answer = await (await client.get("/lines/metrics", params=query, headers=BEARER)).json()
                known.update(answer)
                return answer["lines"]

            assert await more() == []
            append(path, '{"step": 1}\n{"step": 2}\n{"st')
            assert await more() == ['{"step": 1}', '{"step": 2}'] and await more() == []
            append(path, 'ep": 3, "text": "\u2028é"}\n')
            assert await more() == ['{"step": 3, "text": "\u2028é"}']
            cut_after(path, 1)  # a resumed run: another file under the same name
            assert await more() == ['{"step": 1}']
            assert known["end"] == path.stat().st_size
            bad = await client.get("/lines/metrics", params={"after": "x"}, headers=BEARER)
            assert bad.status == 400
            for name in ("config", "..%2f..%2fetc%2fpasswd", ""):
                answer = await client.get(f"/lines/{name}", headers=BEARER)
                assert answer.status == 404 or (await answer.json())["lines"] == []
            about = await (await client.get("/run", headers=BEARER)).json()
            assert about["actors"] == {} and len(about["plots"]) == 13
            (run_dir / ACTORS_FILE).write_text('{"step": 4, "actors": {"actor-0": "ready v3"}}')
            assert (await (await client.get("/run", headers=BEARER)).json())["actors"] == {"actor-0": "ready v3"}

    asyncio.run(check())


@pytest.mark.parametrize("chunk", [16, 100, 10_000])
def test_the_last_lines_are_whole_and_those_after_them_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    path, lines = tmp_path / "events.jsonl", [json.dumps({"step": step}) for step in range(120)]
    path.write_text("\n".join(lines) + '\n{"cut o')
    monkeypatch.setattr(page, "CHUNK_BYTES", chunk)

    async def check() -> None:
        async with client_of(tmp_path) as client:
            last = await (await client.get("/lines/events", headers=BEARER)).json()
            count = len(last["lines"])
            assert last["lines"] == lines[120 - count :] and sum(map(len, last["lines"])) <= chunk
            assert count == 120 or (count + 2) * (len(lines[-1]) + 1) + len('{"cut o') > chunk
            with path.open("a") as file:
                file.write('ff": 1}\n')
            query = {"file": last["file"], "after": last["end"]}
            after = await (await client.get("/lines/events", params=query, headers=BEARER)).json()
            assert after["lines"] == ['{"cut off": 1}'] and after["begin"] == last["end"]

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
    code = "import sys, time; from pathlib import Path; from torchtitan.report.page import LivePage\n"
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
    assert main(["--serve", str(tmp_path / "none")]) == 1
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
async def browse(url: str, profile: Path) -> AsyncIterator[Browser]:
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0",
        f"--user-data-dir={profile}", url, stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        port_file, deadline = profile / "DevToolsActivePort", time.monotonic() + PATIENCE_S
        while not port_file.exists() or "\n" not in port_file.read_text():
            assert time.monotonic() < deadline and process.returncode is None, "Chromium did not start"
            await asyncio.sleep(0.1)
        port = port_file.read_text().split()[0]
        async with ClientSession(timeout=ClientTimeout(PATIENCE_S)) as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                (page,) = [one for one in await answer.json() if one["type"] == "page"]
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
            await browser.wait("document.querySelectorAll('#plots svg').length === 10 && !!at('events').rows.length")
            assert await browser.evaluate("document.title") == "run: live"
            assert await browser.evaluate("at('prompt').textContent") == EVIL
            assert await browser.evaluate("at('completion').textContent") == f"a{EVIL}b"
            assert await browser.evaluate("document.querySelectorAll('img, script').length") == 1
            assert "ready v29" in await browser.evaluate("at('actors').innerText")
            assert "<script>alert(1)</script>" in await browser.evaluate("at('events').innerText")
            assert "exact" in await browser.evaluate("at('facts').innerText")
            colours = "[...at('completion').children].slice(0, 3).map(one => one.style.backgroundColor).join(' ')"
            by_difference = await browser.evaluate(colours)
            assert by_difference == "rgba(36, 99, 180, 0) rgba(192, 57, 85, 0.8) rgba(36, 99, 180, 0.85)"
            await browser.evaluate("at('colour').value = 'version'; at('colour').onchange()")
            first, second, third = (await browser.evaluate(colours)).split(") ")
            assert first == second and third.removesuffix(")") != first
            # It goes on as the files do; a line that is not whole yet waits.
            rows = read_json_lines(run_dir / "metrics.jsonl")
            of_sources = {"step": 31, "reward/mean": 77, "reward/sums/mean": 80, "reward/right/mean": 80}
            of_sources |= {"groups/sums/trained": 3, "groups/game/trained": 1, "reward/game/mean": 68}
            append(run_dir / "metrics.jsonl", "\n" + json.dumps(rows[-2] | of_sources) + '\n{"st')
            append(run_dir / "completions.jsonl", json.dumps(sample(31, prompt="newest")) + "\n")
            await browser.wait("at('cards').innerText.includes('77') && at('prompt').textContent === 'newest'")
            by_source = (
                "[...document.querySelectorAll('#plots .plot')].find(one => one.innerText.includes('by source'))"
            )
            drawn = await browser.evaluate(f"{by_source}.innerText")
            assert "sums" in drawn and "game" in drawn and "right" not in drawn
            assert "1 to 4 of 4" in await browser.evaluate("at('place').textContent")
            # The reader picks one, and it stays while others come; a search for what only one has finds that one.
            await browser.evaluate("at('list').rows[3].click()")
            await browser.wait("at('completion').textContent === 'tail'")
            append(run_dir / "completions.jsonl", json.dumps(sample(32, prompt="later")) + "\n")
            await browser.evaluate("at('step_to').value = 29; at('step_to').onchange()")
            await browser.wait("at('list').rows.length === 2 && at('facts').innerText.includes('29')")
            await browser.evaluate("at('step_to').value = ''; at('text').value = 'NEWEST'; at('text').onchange()")
            await browser.wait("at('list').rows.length === 2 && at('prompt').textContent === 'newest'")
            assert await browser.evaluate("document.title") == "run: live"

    with served(run_dir) as url:
        asyncio.run(check(url))
