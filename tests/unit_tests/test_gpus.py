"""GPUs are counted by their driver's device files."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtitan.inference.devices import visible_devices
from torchtitan.tools import gpus


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev."""
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "count", "any_gpu"),
    [
        ((), 0, False),
        (("nvidiactl", "nvidia-uvm", "nvidia-caps"), 0, False),
        # A container may be given any of a machine's.
        (("nvidia3", "nvidiactl"), 1, True),
        (("nvidia0", "nvidia1", "nvidia10"), 3, True),
        (("dxg",), 0, True),
    ],
)
def test_gpus_are_found_by_their_files(devices: Path, files: tuple[str, ...], count: int, any_gpu: bool) -> None:
    for name in files:
        (devices / name).touch()
    assert gpus.count_gpus() == count and gpus.has_gpu() is any_gpu
    assert visible_devices() == [str(number) for number in range(count)]


def test_gpus_can_be_hidden_from_processes(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (devices / "nvidia0").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not gpus.has_gpu() and visible_devices() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert gpus.has_gpu() and visible_devices() == ["0"]
