"""The last steps of a run's timeline, as the page draws them: one lane per trainer rank and actor."""

from __future__ import annotations

from typing import Any

from torchtitan.report.timeline import SNAPSHOTS, SYNC, TRAINER, Moment, Timeline, Track

STEPS = 12
MAX_RANKS, MAX_ACTORS = 2, 8
# Of all lanes together; the newest are drawn.
MAX_SPANS = 1500
FAILURES = ("aborted", "refused", "poisoned", "evicted")
# What is drawn below the line of its lane: a snapshot or a transfer goes on beside the work above.
BESIDE = {"snapshot", "transfer", "apply", "drain", "failed"}
DRAWN = {
    "data wait", "train", "rollout", "commit", "evaluation", "wake", "checkpoint", "sync stall", "generate", "pause",
    *BESIDE,
}  # fmt: skip
INCIDENTS = {
    "late", "forged", "lost its snapshot", "evicted", "poisoned", "actor_evicted", "actor_restarting",
    "shard server lost", "registry restarted",
}  # fmt: skip


def last_steps(timeline: Timeline) -> dict[str, Any] | None:
    """Return the last STEPS steps: seconds, steps [[end, number]], and lanes with spans [begin, end, kind, name, row]
    and moments [time, name]. Times are in seconds from the beginning of the first of these steps; row 0 is above, 1
    below. None if no step is known."""
    window = _window(timeline)
    if window is None:
        return None
    begin, end = window
    ranks = _ranks(timeline)
    actors = list(dict.fromkeys(track.process for track in timeline.tracks if track.name in ("weights", "generation")))
    lanes = [(name if len(ranks) > 1 else TRAINER, tracks) for name, tracks in [*ranks.items()][:MAX_RANKS]]
    lanes += [(actor, [t for t in timeline.tracks if t.process == actor]) for actor in actors[:MAX_ACTORS]]
    most = MAX_SPANS // max(1, len(lanes))
    drawn = []
    for number, (name, tracks) in enumerate(lanes):
        processes = (TRAINER, SYNC) if number == 0 else (name,)
        moments = [moment for moment in timeline.moments if moment.process in processes]
        drawn.append(
            {
                "name": name,
                "spans": _spans(tracks, begin, end)[-most:],
                "moments": _moments(moments, begin, end)[-50:],
            }
        )
    steps = [span for track in ranks[next(iter(ranks))] for span in track.spans if span.kind == "step"]
    marks = [[round(span.end - begin, 4), span.details["step"]] for span in steps if begin < span.end <= end]
    left_out = len(ranks) + len(actors) - len(lanes)
    return {"seconds": round(end - begin, 4), "steps": marks, "lanes": drawn, "left_out": left_out}


def _window(timeline: Timeline) -> tuple[float, float] | None:
    ranks = _ranks(timeline)
    spans = [span for tracks in ranks.values() for track in tracks for span in track.spans if span.kind == "step"]
    if not spans:
        return None
    newest = max(span.details["step"] for span in spans)
    # An earlier launch may have trained the same step numbers; its spans precede those of the last launch.
    chosen = sorted((span for span in spans if span.details["step"] > newest - STEPS), key=lambda span: span.end)
    return min(span.begin for span in chosen[-STEPS * len(ranks) :]), chosen[-1].end


def _ranks(timeline: Timeline) -> dict[str, list[Track]]:
    """Return the tracks of each trainer rank: its steps and its snapshots."""
    ranks: dict[str, list[Track]] = {}
    for track in timeline.tracks:
        if track.process == TRAINER:
            ranks.setdefault(track.name.removesuffix(SNAPSHOTS), []).append(track)
    return ranks


def _spans(tracks: list[Track], begin: float, end: float) -> list[list[Any]]:
    found = []
    for track in tracks:
        for span in track.spans:
            kind = "failed" if span.kind in FAILURES else span.kind
            if kind not in DRAWN or span.end < begin or span.begin > end:
                continue
            left, right = max(span.begin, begin) - begin, min(span.end, end) - begin
            found.append([round(left, 4), round(right, 4), kind, span.name, int(kind in BESIDE)])
    return sorted(found)


def _moments(moments: list[Moment], begin: float, end: float) -> list[list[Any]]:
    inside = [moment for moment in moments if moment.name in INCIDENTS and begin <= moment.time <= end]
    return [[round(moment.time - begin, 4), moment.name] for moment in inside]
