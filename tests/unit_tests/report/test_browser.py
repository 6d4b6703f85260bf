"""The completions of a run: each selection against a plain loop over all rows, as the file grows and is replaced."""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from torchtitan.report.browser import MAX_ROWS, SORTS, CompletionIndex, Selection
from torchtitan.report.live_server import LiveServer
from torchtitan.report.metrics import ACTORS_FILE, cut_after
from torchtitan.utils.prometheus import Figure, exposition

WORDS = ("seven", "Élan", 'a"b', "back\\slash", "数", "tokens", "line\nbreak")
BEARER = {"Authorization": "Bearer t"}


def rows_of(count: int, seed: int, first: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    rows = []
    for number in range(first, first + count):
        oldest = rng.randrange(5)
        row = {"step": number // 4, "prompt": f"p{number} {rng.choice(WORDS)}", "completion": rng.choice(WORDS) * 3}
        row |= {
            "reward": rng.choice([None, 0.0, 0.5, 1.0]),
            "advantage": rng.uniform(-1, 1),
            "tokens": rng.randrange(9),
        }
        row |= {"versions": [{"version": oldest, "tokens": 1}, {"version": oldest + 1, "tokens": 2}]}
        if rng.random() < 0.7:
            row["source"] = rng.choice(["sums", "games"])
        if rng.random() < 0.2:
            row["segments"] = [{"branch": 0, "text": "hidden " + rng.choice(WORDS)}]
        rows.append(row | {"extra": {"answer": f"gold{number}"}, "rewards": {}, "finish_reason": "stop"})
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def expected(rows: list[dict[str, Any]], selection: Selection) -> list[str]:
    """The prompts that are selected, in their order, by reading every row."""

    def taken(row: dict[str, Any]) -> bool:
        bounds = [
            ("step", selection.step_from, selection.step_to),
            ("reward", selection.reward_from, selection.reward_to),
        ]
        for name, low, high in [*bounds, ("tokens", selection.tokens_from, selection.tokens_to)]:
            if (low is not None or high is not None) and row[name] is None:
                return False
            if (low is not None and row[name] < low) or (high is not None and row[name] > high):
                return False
        texts = [
            row["prompt"],
            row["completion"],
            *(s["text"] for s in row.get("segments", [])),
            row["extra"]["answer"],
        ]
        return (
            (selection.version is None or selection.version in [span["version"] for span in row["versions"]])
            and (not selection.source or row.get("source") == selection.source)
            and any(selection.text.lower() in text.lower() for text in texts)
        )

    rows = [row for row in rows if taken(row)]
    if selection.sort == "newest":
        rows.sort(key=lambda row: -row["step"])
    elif selection.sort != "oldest":
        name, _, down = selection.sort.partition("_")
        known = [row for row in rows if row[name] is not None]
        known.sort(key=lambda row: -row[name] if down else row[name])
        rows = known + [row for row in rows if row[name] is None]
    return [row["prompt"] for row in rows]


def every_page(index: CompletionIndex, selection: Selection, limit: int) -> list[str]:
    found: list[str] = []
    while True:
        page = index.page(selection, len(found), limit)
        assert len(page["rows"]) <= min(limit, MAX_ROWS)
        found += [row["prompt"] for row in page["rows"]]
        if not page["more"]:
            assert selection.text or page["selected"] == len(found)
            return found


@pytest.mark.parametrize("seed", range(40))
def test_pages_hold_what_a_loop_over_all_rows_finds(tmp_path: Path, seed: int) -> None:
    rng, path = random.Random(seed), tmp_path / "completions.jsonl"
    rows = rows_of(rng.randrange(1, 60), seed)
    write(path, rows)
    index = CompletionIndex(path)
    index.update()
    query: dict[str, str] = {"sort": rng.choice(SORTS)}
    query |= {name: str(rng.randrange(8)) for name in ("step_from", "tokens_to", "version") if rng.random() < 0.3}
    query |= {"reward_to": "0.5"} if rng.random() < 0.3 else {}
    query |= {"source": "sums"} if rng.random() < 0.3 else {}
    query |= {"text": rng.choice([*WORDS, "GOLD1", "hidden", "version", "nowhere"])} if rng.random() < 0.5 else {}
    selection = Selection.of(query)
    assert every_page(index, selection, rng.choice([1, 7, 1000])) == expected(rows, selection)


def test_it_reads_on_and_starts_anew_when_a_resume_replaces_the_file(tmp_path: Path) -> None:
    path, rows = tmp_path / "completions.jsonl", rows_of(20, 0)
    index = CompletionIndex(path)
    assert index.update() == 1.0
    assert index.page(Selection(), 0, 10)["all"] == 0 and index.row("0") is None
    write(path, rows[:10])
    with path.open("a") as file:
        file.write('no JSON\n{"step": 3, "cut')
    # Row by row, if there is no time for more.
    assert 0 < index.update(-1.0) < index.update(-1.0) < 1 and len(index.entries) == 2
    assert index.update() == 1.0
    assert every_page(index, Selection("oldest"), 3) == [row["prompt"] for row in rows[:10]]
    cut_after_last_whole = path.read_text().rpartition("\n")[0] + "\n"
    path.write_text(cut_after_last_whole)
    write(path, rows[10:])
    index.update()
    assert every_page(index, Selection("oldest"), 3) == [row["prompt"] for row in rows]
    begins = [entry.begin for entry in index.entries]
    assert [(index.row(str(begin)) or {})["prompt"] for begin in begins] == [row["prompt"] for row in rows]
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines() if "no JSON" not in line))
    cut_after(path, 1)
    index.update()
    assert every_page(index, Selection("oldest"), 3) == [row["prompt"] for row in rows[:8]]


def test_what_the_server_answers(tmp_path: Path) -> None:
    write(tmp_path / "completions.jsonl", rows_of(30, 1))
    metrics = [{"step": 1, "loss": 0.5, "reward/mean": 0.25, "x": None}, {"step": 1, "eval/pass@1": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    (tmp_path / ACTORS_FILE).write_text('{"step": 1, "actors": {"actor-0": "ready v3", "b\\"c": "evicted"}}')

    async def check() -> None:
        async with TestClient(TestServer(LiveServer(tmp_path, "t").app())) as client:
            page = await (await client.get("/completions?limit=5&sort=oldest", headers=BEARER)).json()
            assert [row["step"] for row in page["rows"]] == [0, 0, 0, 0, 1] and page["more"] and page["selected"] == 30
            assert page["sources"] == ["games", "sums"]
            row = await (await client.get(f"/completion?at={page['rows'][1]['begin']}", headers=BEARER)).json()
            assert row["extra"] == {"answer": "gold1"}
            assert (await client.get("/completion?at=1", headers=BEARER)).status == 404
            for wrong in ("offset=x", "step_from=x", "sort=best"):
                assert (await client.get(f"/completions?{wrong}", headers=BEARER)).status == 400
            answer = await client.get("/metrics", headers=BEARER)
            assert answer.content_type == "text/plain" and "version=0.0.4" in answer.headers["Content-Type"]
            lines = (await answer.text()).splitlines()
            assert {"torchtitan_reward_mean 0.25", "torchtitan_eval_pass_1 0.5", "torchtitan_step 1.0"} <= set(lines)
            assert r'torchtitan_actor_version{actor="b\"c",state="evicted"} -1.0' in lines

    asyncio.run(check())


def test_the_text_format() -> None:
    figures = [Figure("a/b", 1.5), Figure("calls_total", 2, {"who": 'x"y\\z\n'}), Figure("a/b", 2, {"k": "v"})]
    text = exposition(figures)
    assert text.splitlines() == [
        "# TYPE a_b gauge", "a_b 1.5", 'a_b{k="v"} 2',
        "# TYPE calls_total counter", r'calls_total{who="x\"y\\z\n"} 2',
    ]  # fmt: skip
    assert all(
        re.fullmatch(r"# TYPE \w+ (gauge|counter)|[a-zA-Z_]\w*(\{.*\})? \S+", line) for line in text.splitlines()
    )
