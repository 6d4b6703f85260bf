"""vLLM inside the trainer's ranks: what it samples against transformers with the same weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed_launcher import run_distributed
from tests.engines.models import BF16_SPREAD, FP32_TOLERANCE, greedy, log_probs

PROMPTS = [[4, 9, 12, 5], [17, 3, 8, 8, 11, 6, 20, 2], [30, 41, 52]]
# Longer than the largest KV block, so that its beginning is cached.
LONG = [(7 * number) % 60 + 2 for number in range(150)]
# Of the worst token and of the mean of all. In float32 the first is derived for the largest log-probs, and what is
# typical lies far below. In bfloat16 the first is eight times the root mean square: of hundreds of tokens the worst one
# counts, and errors have long tails.
TOLERANCE = {"float32": (FP32_TOLERANCE, 1e-5), "bfloat16": (8 * BF16_SPREAD, BF16_SPREAD)}

# Ranks, options of the job, whether the head is tied, the engine's type, what happens to KV caches in flight.
LAYOUTS = {
    "one rank": (1, [], True, "float32", "keep"),
    "FSDP2, engine TP 2": (2, ["--inference.colocated.tensor_parallel_size", "2"], False, "bfloat16", "keep"),
    "trainer TP 2, two replicas": (2, ["--parallelism.tensor_parallel_degree", "2"], True, "float32", "recompute"),
}
ADAPTED = "adapters"

Launched = Callable[[int], tuple[Path, dict[str, list[Any]]]]


@pytest.fixture(scope="module")
def launched(
    vllm_python: Path, engine_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Launched:
    """(ranks) -> a folder, and for every layout of so many ranks what each of them did and saw; started once."""

    @functools.cache
    def launch(ranks: int) -> tuple[Path, dict[str, list[Any]]]:
        parts: dict[str, dict[str, Any]] = {}
        for name, (needed, options, tied, dtype, kv) in LAYOUTS.items():
            models = [str(engine_model(tied, dtype, seed)) for seed in (0, 1)]
            more = [*options, "--inference.dtype", dtype, "--inference.in_flight_kv", kv]
            if needed == ranks:
                parts[name] = {"function": "story", "models": models, "options": more, "prompts": PROMPTS, "long": LONG}
        if ranks == 1:
            model, options = str(engine_model(False, "float32", 0)), ["--inference.dtype", "float32"]
            parts[ADAPTED] = {"function": "adapted", "model": model, "options": options, "prompt": PROMPTS[0]}
        folder = tmp_path_factory.mktemp("parts")
        seen = run_distributed(
            "tests.engines.colocated_parts:play_parts", ranks, timeout=400.0, python=vllm_python,
            folder=str(folder), parts=list(parts.values()),
        )  # fmt: skip
        return folder, dict(zip(parts, zip(*seen, strict=True), strict=True))

    return launch


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def story(request: pytest.FixtureRequest, launched: Launched, engine_model: Callable[..., Path]) -> dict[str, Any]:
    """What the ranks of one layout did and saw, from one start of the engine."""
    ranks, _, tied, dtype, kv = LAYOUTS[request.param]
    models = [engine_model(tied, dtype, seed) for seed in (0, 1)]
    seen = launched(ranks)[1][request.param]
    return {"seen": seen, "models": models, "dtype": dtype, "kv": kv, "answers": seen[0]["answers"], "ranks": ranks}


def differences(model: Path, dtype: str, prompt: list[int], completion: dict[str, Any], start: int = 0) -> list[float]:
    """|behaviour log-prob − transformers'| of the completion's tokens from `start` on."""
    tokens = completion["token_ids"]
    expected = log_probs(model, [*prompt, *tokens], dtype)[len(prompt) - 1 :]
    assert len(completion["log_probs"]) == len(tokens) == len(expected)
    return [abs(ours - reference) for ours, reference in zip(completion["log_probs"], expected, strict=True)][start:]


def assert_close(found: list[float], dtype: str) -> None:
    worst, mean = TOLERANCE[dtype]
    assert found
    assert max(found) < worst
    assert sum(found) / len(found) < mean


def completions(report: dict[str, Any], name: str) -> list[dict[str, Any]]:
    answer = report["answers"][name]
    assert answer["refused"] == ""
    return answer["completions"]


@pytest.mark.parametrize("version", [0, 1], ids=["first", "second"])
def test_log_probs_are_those_of_the_version_that_the_tokens_carry(story: dict[str, Any], version: int) -> None:
    found: list[float] = []
    for number, prompt in enumerate(PROMPTS):
        group = completions(story, f"{('first', 'second')[version]}-{number}")
        assert len(group) == 2
        assert group[0]["token_ids"] != group[1]["token_ids"]
        for completion in group:
            length = len(completion["token_ids"])
            assert completion["spans"] == [{"epoch": "e1-test", "version": version, "start": 0, "end": length}]
            found += differences(story["models"][version], story["dtype"], prompt, completion)
    assert_close(found, story["dtype"])


@pytest.mark.parametrize("version", [0, 1], ids=["first", "second"])
def test_greedy_tokens_are_those_of_transformers(story: dict[str, Any], version: int) -> None:
    """In bfloat16 two tokens can be as likely as each other; the log-prob says that the engine took a best one."""
    for number, prompt in enumerate(PROMPTS):
        (completion,) = completions(story, f"{('first', 'second')[version]}-greedy-{number}")
        expected = greedy(story["models"][version], prompt, 24, story["dtype"])
        if story["dtype"] == "float32":
            assert [*completion["token_ids"]] == without_end(expected, completion)
        else:
            assert_close(differences(story["models"][version], story["dtype"], prompt, completion), story["dtype"])


def without_end(expected: list[int], completion: dict[str, Any]) -> list[int]:
    """No stop token was asked for, so the engine goes on where transformers' helper ends."""
    return [*expected, *completion["token_ids"][len(expected) :]]


def test_samples_that_live_through_a_new_version_carry_both(story: dict[str, Any]) -> None:
    for number in range(2):
        for completion in completions(story, f"across-{number}"):
            assert len(completion["spans"]) == 2, completion
            first, second = completion["spans"]
            assert (first["version"], second["version"]) == (0, 1)
            assert 0 == first["start"] < first["end"] == second["start"] < second["end"] == len(completion["token_ids"])
            before = differences(story["models"][0], story["dtype"], LONG, completion)[: first["end"]]
            assert_close(before, story["dtype"])
            after = differences(story["models"][1], story["dtype"], LONG, completion, second["start"])
            if story["kv"] == "recompute":
                # With the KV cache made anew nothing of the old weights is left.
                assert_close(after, story["dtype"])
            else:
                assert sum(after) / len(after) > 0.05


def test_nothing_cached_with_old_weights_reaches_new_samples(story: dict[str, Any]) -> None:
    """Their prompt's blocks are still held by samples that began with the old weights. Those that waited in the engine
    while the weights changed are new samples too."""
    for name in ("second-long-0", "second-long-1", "late-0", "late-1"):
        for completion in completions(story, name):
            assert [span["version"] for span in completion["spans"]] == [1]
            assert_close(differences(story["models"][1], story["dtype"], LONG, completion), story["dtype"])


def test_the_ranks_of_a_group_sample_the_same_tokens(story: dict[str, Any]) -> None:
    seen = story["seen"]
    if story["ranks"] == 1:
        assert seen[0]["tokens"]
    elif len(seen[0]["actors"]) == 1:
        assert seen[0]["tokens"] == seen[1]["tokens"]
    else:
        # Two replicas share the requests.
        assert seen[0]["tokens"]
        assert not set(seen[0]["tokens"]) & set(seen[1]["tokens"])


def test_what_the_engine_cannot_take_is_refused_alone(story: dict[str, Any]) -> None:
    assert "256" in story["answers"]["too-long"]["refused"]
    # Log-probs among tokens that nobody knows would mean nothing.
    assert "which tokens were kept" in story["answers"]["truncated"]["refused"]
    assert len(completions(story, "fits")[0]["token_ids"]) == 4


def test_engine_beside_the_trainer(story: dict[str, Any]) -> None:
    """It leaves the trainer's random numbers alone, and the threads that it chose before (afterwards nobody can), drops
    what nobody waits for, refuses to sample with old weights, and leaves no shared memory behind."""
    for rank in story["seen"]:
        assert rank["random_numbers_kept"] and rank["threads"] == 2
        assert rank["dropped"]
        assert "holds weights e1-test/1 instead of e1-test/2" in rank["stale"]
        assert set(rank["actors"].values()) == {1}
        assert rank["left_behind"] == []


def test_adapters_are_merged_in_the_trainer(launched: Launched, engine_model: Callable[..., Path]) -> None:
    folder, reports = launched(1)
    model = engine_model(False, "float32", 0)
    for version, answer in enumerate(reports[ADAPTED][0]):
        (completion,) = answer["completions"]
        assert [span["version"] for span in completion["spans"]] == [version]
        merged = folder / str(list(reports).index(ADAPTED)) / f"merged-{version}"
        assert_close(differences(merged, "float32", PROMPTS[0], completion), "float32")
        assert max(differences(model, "float32", PROMPTS[0], completion)) > 0.3
