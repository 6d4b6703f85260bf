"""GPUs are counted by their driver's device files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.placement import engine_devices, visible_devices
from torchtitan.preflight.check import Check
from torchtitan.preflight.inference import check_inference
from torchtitan.preflight.plan import describe_plan
from torchtitan.utils import machine
from torchtitan.weight_sync.transports.ipc import Ipc


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
    config.inference.engine.tensor_parallel_size = 2
    assert engine_devices(config, 1) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    with pytest.raises(UserError, match="there are 4"):
        engine_devices(config, 2)
    # Ranks on the CPU leave all, and engines without GPUs get none.
    monkeypatch.setenv("TORCHTITAN_DEVICE", "cpu")
    config.inference.sleep_level = 0
    assert engine_devices(config, 0) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    config.inference.backend = "embedded"
    assert engine_devices(config, 0) == {}


@pytest.fixture
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Makes an environment with a version of NCCL, and returns its interpreter."""

    def make(name: str, version: str) -> str:
        packages = tmp_path / name / "lib" / "python3.12" / "site-packages"
        (packages / f"nvidia_nccl_cu13-{version}.dist-info").mkdir(parents=True)
        (packages / "torch-2.14.0+cu130.dist-info").mkdir()
        python = tmp_path / name / "bin" / "python"
        python.parent.mkdir()
        python.symlink_to(sys.executable)
        return str(python)

    return make


@pytest.mark.parametrize("engines_nccl", ["2.29.7", "2.30.7"])
def test_communicators_need_one_version_of_nccl(
    engines_nccl: str, environments: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = environments("engine", engines_nccl)
    monkeypatch.setattr(sys, "executable", environments("trainer", "2.29.7"))
    config = JobConfig()
    config.inference.backend, config.inference.engine.python = "vllm", engine
    config.model.name, config.model.flavor = "qwen3", "0.6B"
    differs = engines_nccl != "2.29.7"
    plan = describe_plan(config, 1)
    assert ("# WARNING: the trainer has NCCL 2.29.7 and vllm has 2.30.7" in plan) is differs
    # What the engine's environment has, without its build.
    assert (f"{sys.executable} -m pip install torch==2.14.0, or" in plan) is differs
    for transport in ("tcp", "disk", "nccl"):
        config.weight_sync.transport = transport
        check = Check(config, 1, planning=True)
        check_inference(check)
        refused = [problem.text for problem in check.problems if "NCCL" in problem.text]
        assert len(refused) == (differs and transport == "nccl")


@pytest.mark.parametrize("driver", ["570.86.15", "580.65.06", ""])
def test_engines_for_cuda_13_need_its_driver(
    driver: str, environments: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan.inference.engines.checks.driver_version", lambda: driver)
    config = JobConfig()
    config.inference.backend, config.inference.engine.python = "vllm", environments("engine", "2.30.7")
    check = Check(config, 1, planning=False)
    check_inference(check)
    assert any("driver of 580 or newer: this is 570" in issue.text for issue in check.problems) is (driver[:3] == "570")


def test_nccl_needs_engines_that_receive_on_their_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config = JobConfig()
    config.weight_sync.transport = "nccl"

    def refused(device: str, **inference: object) -> bool:
        monkeypatch.setenv("TORCHTITAN_DEVICE", device)
        config.inference.backend = inference.get("backend", "vllm")
        config.inference.engine.tensor_parallel_size = inference.get("tensor_parallel_size", 1)
        check = Check(config, 1, planning=True)
        check_inference(check)
        return any("NCCL goes from GPU to GPU" in issue.text for issue in check.problems)

    assert not refused("cuda")
    for others in ({"tensor_parallel_size": 2}, {"backend": "sglang"}, {"backend": "embedded"}):
        # On a CPU all of them receive over gloo.
        assert refused("cuda", **others) and not refused("cpu", **others)
    config.inference.vllm.route = "agent"  # type: ignore[attr-defined]
    assert refused("cuda")


def test_ipc_needs_engines_that_see_the_ranks_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    config = JobConfig()
    config.inference.backend, config.weight_sync.transport = "sglang", "ipc"
    for device, apart in (("cuda", True), ("cpu", True), ("cuda", False)):
        monkeypatch.setenv("TORCHTITAN_DEVICE", device)
        config.inference.sleep_level, config.grpo.async_weight_update = (0, True) if apart else (1, False)
        check = Check(config, 1, planning=True)
        check_inference(check)
        assert any("see only their own GPUs" in issue.text for issue in check.problems) is (device == "cuda" and apart)


@pytest.mark.parametrize(
    "change",
    [
        lambda config: setattr(config.inference, "servers", ["http://127.0.0.1:8000"]),
        lambda config: setattr(config.inference, "backend", "embedded"),
        lambda config: setattr(config.inference, "backend", "colocated"),
        lambda config: setattr(config.rollout, "replay", "batches"),
    ],
    ids=["servers that see all", "on the CPU", "in the ranks", "no engine is started"],
)
def test_ipc_is_for_engines_that_have_no_gpus_of_their_own(
    change: Callable[[JobConfig], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHTITAN_DEVICE", "cuda")
    config = JobConfig()
    config.inference.backend, config.weight_sync.transport = "sglang", "ipc"
    assert [key for key, _ in Ipc.problems(config, lambda: None)] == ["weight_sync.transport"]
    change(config)
    assert not list(Ipc.problems(config, lambda: None))
