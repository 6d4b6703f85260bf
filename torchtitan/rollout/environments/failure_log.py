"""What goes wrong in episodes: counted by kind, written as events, and said again where it does not end."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from torchtitan.rollout.gateway.exchange import without_answer
from torchtitan.utils.json_lines import EventLog

# A failure's kind -> what counts it. Together they are `failures`.
COUNTS = {
    "timeout": "timeouts",
    "crash": "crashes",
    "exception": "exceptions",
    "unasked": "unasked",
    "unanswered": "unanswered",
    "refused": "refused",
    "gateway": "gateway_losses",
}
# So many events of each kind are written; all are counted.
EVENTS_OF_A_KIND = 20
# An event says so when this many episodes, one after the other, had the same kind of failure.
IN_A_ROW = 5
# Of what an agent has written to its standard error, the end of it that an event quotes.
QUOTED_CHARACTERS = 500


class FailureLog:
    """The failures of an environment's episodes. `statistics` counts attempts at episodes that failed, by kind."""

    def __init__(self, events: EventLog | None):
        self._events = events
        self._written: Counter[str] = Counter()
        self._in_a_row: Counter[str] = Counter()
        self.statistics: Counter[str] = Counter(dict.fromkeys(("failures", *COUNTS.values()), 0))
        self.latest = ""
        """Why the latest attempt failed"""

    def write(self, kind: str, event: str, **fields: object) -> None:
        """Write an event of a failure, unless there have been many of its kind."""
        if self._events is not None and self._written[kind] < EVENTS_OF_A_KIND:
            self._written[kind] += 1
            shown = {name: value for name, value in fields.items() if value not in ("", [], {}, None)}
            self._events.write(event, level=logging.WARNING, **shown)

    def attempt_failed(
        self, kind: str, where: str, reason: str, then: str = "", stderr: str = "", reported: bool = False
    ) -> None:
        """Count an attempt at an episode that failed.

        where: what it was doing; then: what becomes of the episode; stderr: the end of its agent's standard error;
        reported: whether an event has told of the cause already.
        """
        self.statistics.update(["failures", COUNTS[kind]])
        self.latest = reason
        if not reported:
            about = {"what": kind, "in": where, "reason": reason, "then": then, "stderr": stderr[-QUOTED_CHARACTERS:]}
            self.write(kind, "environment_failed", **about)
        self._go_on([kind], reason)

    def calls_went_wrong(
        self, episode: str, counts: Mapping[str, int], refusals: Sequence[Mapping[str, str]], stderr: str
    ) -> list[str]:
        """Write an event of an episode's calls that got no answer, and return their kinds.

        counts, refusals: see SessionRecord.
        """
        wrong = without_answer(counts)
        if wrong:
            reasons = [f"{refusal['path']}: {refusal['reason']}" for refusal in refusals]
            about = {"episode": episode, "calls": wrong, "reasons": reasons, "stderr": stderr[-QUOTED_CHARACTERS:]}
            self.write(min(wrong, key=lambda name: self._written[name]), "calls_without_answer", **about)
        return list(wrong)

    def attempt_ended_well(self, kinds: Iterable[str] = ()) -> None:
        """Count an attempt that did not fail; kinds: what went wrong with calls in it all the same."""
        self._go_on(list(kinds), "see calls_without_answer in events.jsonl")

    def _go_on(self, kinds: Sequence[str], reason: str) -> None:
        self._in_a_row = Counter({kind: self._in_a_row[kind] + 1 for kind in kinds})
        for kind, count in self._in_a_row.items():
            if count == IN_A_ROW and self._events is not None:
                self._events.write("episodes_fail_alike", level=logging.ERROR, what=kind, in_a_row=count, reason=reason)

    def summary(self) -> str:
        """Return in words what has failed so far and why it did last; empty for nothing."""
        counts = [f"{self.statistics[name]} {name}" for name in COUNTS.values() if self.statistics[name]]
        if not counts:
            return ""
        return (
            f"; {self.statistics['failures']} attempts at episodes failed ({', '.join(counts)}), the latest one: "
            f"{self.latest} (environment_failed in events.jsonl)"
        )
