"""What a run takes where its ranks have GPUs."""

from __future__ import annotations

import shutil
from importlib import metadata

import pytest

from torchtitan.config import gpu_defaults
from torchtitan.config.device_memory import allocator_settings
from torchtitan.config.job_config import JobConfig


def test_a_gpu_is_what_the_driver_lists_and_nobody_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHTITAN_DEVICE", raising=False)
    monkeypatch.setattr(shutil, "which", lambda program: f"/bin/{program}")
    monkeypatch.setattr(gpu_defaults, "count_gpus", lambda: 8)
    for listed, hidden in ((0, None), (2, None), (2, "")):
        monkeypatch.setattr(gpu_defaults, "gpus_of_driver", lambda listed=listed: listed)
        if hidden is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert gpu_defaults.trains_on_gpu() is (listed > 0 and hidden is None)


@pytest.mark.parametrize(
    ("backend", "transport", "level", "offload", "expected"),
    [
        ("colocated 0.33.1", "tcp", 2, False, "expandable_segments:True,pinned_max_cached_size_mb:1"),
        ("colocated 0.32.0+cpu", "tcp", 1, False, "expandable_segments:True"),
        ("colocated 0.31.2", "tcp", 1, False, ""),
        ("vllm", "tcp", 0, False, "expandable_segments:True,pinned_max_cached_size_mb:1"),
        ("vllm", "nccl", 0, "optimizer", "expandable_segments:True,pinned_max_cached_size_mb:1"),
        ("vllm", "tcp", 1, True, "expandable_segments:True"),
        ("vllm", "ipc", 2, False, "pinned_max_cached_size_mb:1"),
        ("colocated", "tcp", 2, False, "pinned_max_cached_size_mb:1"),
        ("colocated", "tcp", 1, False, ""),
    ],
)
def test_ranks_set_up_allocators_for_what_shares_their_memory(
    backend: str,
    transport: str,
    level: int,
    offload: bool | str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is behind the backend is the version of vLLM that is installed there."""

    def installed(_: str) -> str:
        if not version:
            raise metadata.PackageNotFoundError
        return version

    backend, _, version = backend.partition(" ")
    monkeypatch.setattr(metadata, "version", installed)
    config = JobConfig()
    config.inference.backend, config.weight_sync.transport = backend, transport
    config.inference.sleep_level = level
    config.training.enable_cpu_offload = offload  # type: ignore[assignment]
    assert allocator_settings(config) == expected
