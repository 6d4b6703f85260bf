"""Where the parts of a run note what they did when, for report/timeline.py. Each file is bounded."""

from __future__ import annotations

from pathlib import Path

FOLDER = "timeline"


def rank_file(run_dir: Path, rank: int) -> Path:
    """Steps of one trainer rank (report/step_recorder.py)."""
    return run_dir / FOLDER / f"rank-{rank}.jsonl"


def actor_file(run_dir: Path, actor: str) -> Path:
    """What one embedded engine did (inference/embedded/activity.py)."""
    return run_dir / FOLDER / f"{actor}.jsonl"
