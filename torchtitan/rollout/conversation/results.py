"""Which call each result of a tool belongs to: its function's name, and its place among the results of a turn.

APIs tie a result to its call by an id. Chat templates read the function's name, or the order alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torchtitan.rollout.conversation.messages import ASSISTANT, TOOL, Messages


class _Turn(NamedTuple):
    """A message of the assistant with its calls, and what stands behind it up to the next one."""

    begin: int
    """The place of that message; -1 for what stands before the first one"""
    end: int
    calls: list[dict[str, Any]]
    places: list[int]
    """Of the results among the messages"""
    owners: list[int | None]
    """The number of each result's call; None if it is no call of this turn"""


def settle_results(messages: Messages) -> list[dict[str, Any]]:
    """Return the messages with the results of each turn in the order of its calls, and with the names of the functions
    that were called. Messages are in the form of `read_message`.

    A result whose call is not among the messages keeps its place, and has no name unless it came with one.
    """
    settled = list(messages)
    names: dict[str, str] = {}
    for turn in _turns(messages):
        owned: list[tuple[int, int]] = []
        for place, owner in zip(turn.places, turn.owners, strict=True):
            name = names.get(str(messages[place].get("tool_call_id")))
            if owner is not None:
                name = _name(turn.calls[owner])
                owned.append((owner, place))
            if name is not None:
                settled[place] = {**messages[place], "name": name}
        in_order = [settled[place] for _, place in sorted(owned)]
        for (_, place), message in zip(owned, in_order, strict=True):
            settled[place] = message
        names |= {str(call["id"]): _name(call) for call in turn.calls if "id" in call}
    return settled


def split_turns(messages: Messages) -> list[dict[str, Any]]:
    """Return the messages with each call in a message of its own, before its results."""
    split: list[dict[str, Any]] = []
    for turn in _turns(messages):
        if len(turn.calls) < 2:
            split += messages[max(turn.begin, 0) : turn.end]
            continue
        owners = dict(zip(turn.places, turn.owners, strict=True))
        behind: dict[int | None, list[dict[str, Any]]] = {}
        for place in range(turn.begin + 1, turn.end):
            behind.setdefault(owners.get(place), []).append(messages[place])
        for number, call in enumerate(turn.calls):
            message = messages[turn.begin] if number == 0 else {"role": ASSISTANT, "content": ""}
            split += [{**message, "tool_calls": [call]}, *behind.get(number, ())]
        split += behind.get(None, ())
    return split


def call_numbers(messages: Messages) -> list[int | None]:
    """Return for each message the number of the call whose result it is, from 0 for the first of the turn before it;
    None for what is no result, or that of another call."""
    found: list[int | None] = [None for _ in messages]
    for turn in _turns(messages):
        for place, owner in zip(turn.places, turn.owners, strict=True):
            found[place] = owner
    return found


def _turns(messages: Messages) -> Iterator[_Turn]:
    """Yield all turns in order; the first one, without calls, has what stands before any message of the assistant."""
    begins = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]
    for begin, end in zip([-1, *begins], [*begins, len(messages)], strict=True):
        calls = messages[begin].get("tool_calls", []) if begin >= 0 else []
        places = [place for place in range(begin + 1, end) if messages[place]["role"] == TOOL]
        yield _Turn(begin, end, calls, places, _owners(calls, [messages[place] for place in places]))


def _owners(calls: Sequence[dict[str, Any]], results: Messages) -> list[int | None]:
    """Return the number of each result's call: by its id. Where calls or results have no ids, by the function's name,
    and else in the order of the calls."""
    owners: list[int | None] = [None for _ in results]
    if not calls or not results:
        return owners
    ids = [str(call.get("id") or "") for call in calls]
    given = [str(result.get("tool_call_id") or "") for result in results]
    by_id = _queues(enumerate(ids))
    for number, key in enumerate(given):
        if key and key in by_id:
            same = by_id[key]
            owners[number] = same.popleft() if len(same) > 1 else same[0]
    open_results = [number for number, owner in enumerate(owners) if owner is None]
    if all(ids):  # a result with an id belongs to no call with another one
        open_results = [number for number in open_results if not given[number]]
    if not open_results:
        return owners
    taken = {*owners}
    free = [owner for owner in range(len(calls)) if owner not in taken]
    by_name = _queues((owner, _name(calls[owner])) for owner in free)
    for number in open_results:
        if named := by_name.get(str(results[number].get("name"))):
            owners[number] = named.popleft()
    unnamed = iter(sorted(owner for queue in by_name.values() for owner in queue))
    for number in open_results:
        if owners[number] is None:
            owners[number] = next(unnamed, None)
    return owners


def _queues(keys: Iterable[tuple[int, str]]) -> dict[str, deque[int]]:
    """Return the numbers of each key, in order."""
    queues: dict[str, deque[int]] = {}
    for number, key in keys:
        queues.setdefault(key, deque()).append(number)
    return queues


def _name(call: dict[str, Any]) -> str:
    name: str = call.get("function", call)["name"]
    return name
