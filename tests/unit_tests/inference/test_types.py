"""What a recorder makes of calls of the policy: every sampled token once, behind exactly what it was sampled behind."""

from __future__ import annotations

import random

from torchtitan.inference.types import Branch, Completion, Given, VersionSpan, add_turn, joined_spans, stream_seed


def sampled(*token_ids: int, version: int = 0) -> Completion:
    return Completion(
        list(token_ids),
        [-0.5 * token for token in token_ids],
        "stop",
        [VersionSpan("e", version, 0, len(token_ids))],
    )


def test_a_conversation_is_one_branch() -> None:
    branches: list[Branch] = []
    add_turn(branches, [1, 2], sampled(3, 4))
    add_turn(branches, [1, 2, 3, 4, 5], sampled(6, version=1))
    add_turn(branches, [1, 2, 3, 4, 5, 6], sampled(7, version=1))
    (branch,) = branches
    assert branch.segments[0] == Given([1, 2]) and len(branch.segments) == 5
    assert branch.token_ids == [1, 2, 3, 4, 5, 6, 7] and branch.sampled_at == [2, 3, 5, 6]
    spans = [VersionSpan("e", 0, 0, 2), VersionSpan("e", 1, 2, 4)]
    assert joined_spans(branch.sampled) == spans


def test_rewritten_history_begins_a_branch() -> None:
    branches: list[Branch] = []
    add_turn(branches, [1, 2], sampled(3, 4))
    add_turn(branches, [1, 2, 3, 9], sampled(5))  # 4 was dropped
    add_turn(branches, [1, 2, 3, 4, 8], sampled(6))
    add_turn(branches, [1, 2, 3, 4, 7], sampled(6))  # a second call from the same place
    assert [branch.token_ids for branch in branches] == [[1, 2, 3, 4, 8, 6], [1, 2, 3, 9, 5], [1, 2, 3, 4, 7, 6]]
    assert [branch.sampled_at for branch in branches] == [[2, 3, 5], [4], [5]]


def test_random_programs_lose_and_repeat_nothing() -> None:
    """Programs that go on from any earlier point: each completion is once there, behind the prompt of its call."""
    rng = random.Random(0)
    for _ in range(200):
        branches: list[Branch] = []
        calls: list[tuple[list[int], Completion]] = []
        histories = [[1]]
        for _ in range(rng.randint(1, 8)):
            start = rng.choice(histories)
            prompt = start[: rng.randint(1, len(start))] + [rng.randint(1, 2) for _ in range(rng.randint(0, 2))]
            completion = sampled(*(rng.randint(1, 2) for _ in range(rng.randint(1, 3))))
            add_turn(branches, prompt, completion)
            calls.append((prompt, completion))
            histories.append(prompt + completion.token_ids)
        found = []
        for branch in branches:
            before: list[int] = []
            for segment in branch.segments:
                if isinstance(segment, Completion):
                    found.append((list(before), segment))
                before += segment.token_ids
        assert len(found) == len(calls)
        for prompt, completion in calls:
            assert any(read == prompt and segment is completion for read, segment in found)


def test_seeds_of_samples() -> None:
    seeds = [stream_seed(seed, sample) for seed in range(20) for sample in range(20)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**48 for seed in seeds)
    assert seeds == [stream_seed(seed, sample) for seed in range(20) for sample in range(20)]
