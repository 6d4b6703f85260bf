"""Traces of torch's profiler, as [profiling] asks for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from torchtitan.config.job_config import Profiling


@contextlib.contextmanager
def profile(config: Profiling, run_dir: Path, rank: int) -> Iterator[torch.profiler.profile | None]:
    """Every profile_freq steps, record one step (after one to warm up) into {folder}/step-N/rank-R.json.

    None where nothing is recorded. The files open in Perfetto and chrome://tracing.
    """
    if not config.enable_profiling:
        yield None
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
