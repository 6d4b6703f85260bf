"""Traces of torch's profiler, as [profiling] asks for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from torchtitan.config.job_config import Profiling


class Profiler(Protocol):
    """Told of the end of every step."""

    def step(self) -> None: ...


class _NoProfiler:
    def step(self) -> None:
        """Nothing is recorded."""


@contextlib.contextmanager
def profile(config: Profiling, run_dir: Path, rank: int) -> Iterator[Profiler]:
    """Every profile_freq steps, record one step (after one to warm up) into {folder}/step-N/rank-R.json.

    The files open in Perfetto and chrome://tracing.
    """
    if not config.enable_profiling:
        yield _NoProfiler()
        return
    folder = run_dir / config.save_traces_folder

    def save(profiler: torch.profiler.profile) -> None:
        target = folder / f"step-{profiler.step_num}"
        target.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(target / f"rank-{rank}.json"))

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    schedule = torch.profiler.schedule(wait=max(config.profile_freq - 2, 0), warmup=1, active=1)
    with torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=save) as profiler:
        yield profiler
