"""GPUs are counted by their driver's device files."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.placement import engine_devices, visible_devices
from torchtitan.utils import machine


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev."""
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    monkeypatch.setattr(machine, "gpus_of_driver", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_without_device_files_the_driver_is_asked(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus_of_driver", lambda: 2)
    assert machine.has_gpu() and visible_devices() == ["0", "1"]


@pytest.mark.parametrize(
    ("files", "count", "any_gpu"),
    [
        ((), 0, False),
        (("nvidiactl", "nvidia-uvm", "nvidia-caps"), 0, False),
        # A container may be given any of a machine's.
        (("nvidia3", "nvidiactl"), 1, True),
        (("nvidia0", "nvidia1", "nvidia10"), 3, True),
        # WSL shows this one for the GPUs of all makers.
        (("dxg",), 0, False),
    ],
)
def test_gpus_are_found_by_their_files(devices: Path, files: tuple[str, ...], count: int, any_gpu: bool) -> None:
    for name in files:
        (devices / name).touch()
    assert machine.count_gpus() == count and machine.has_gpu() is any_gpu
    assert visible_devices() == [str(number) for number in range(count)]


def test_gpus_can_be_hidden_from_processes(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (devices / "nvidia0").touch()
    for nothing in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
        assert not machine.has_gpu() and visible_devices() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert machine.has_gpu() and visible_devices() == ["0"]


def test_engines_get_the_gpus_that_ranks_leave_or_those_of_ranks_that_they_take_turns_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("TORCHTITAN_DEVICE", raising=False)
    config = JobConfig()
    config.inference.backend = "vllm"
    assert [engine_devices(config, number)["CUDA_VISIBLE_DEVICES"] for number in range(2)] == ["2", "3"]
    config.inference.sleep_level, config.grpo.async_weight_update = 1, False
    assert [engine_devices(config, number)["CUDA_VISIBLE_DEVICES"] for number in range(4)] == ["0", "1", "2", "3"]
    config.inference.tensor_parallel_size = 2
    assert engine_devices(config, 1) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    with pytest.raises(UserError, match="there are 4"):
        engine_devices(config, 2)
