"""What a run may use of a machine: memory and cores, by the machine's own figures and by its control groups'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.unit_tests.conftest import WriteConfig
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import ConfigError
from torchtitan.models.shape.checkpoint_shape import read_shape
from torchtitan.models.shape.compute_type import choose_types
from torchtitan.models.shape.costs import estimate_memory
from torchtitan.preflight.memory import host_bytes, tight_memory
from torchtitan.preflight.validate import load_config
from torchtitan.utils import machine
from torchtitan.utils.machine import count_cores, host_memory

GIB = 2**30
V1, V2 = "4:memory:/job/run\n3:cpu,cpuacct:/job/run\n0::/\n", "0::/job/run\n"
V1_WITHOUT_LIMIT = 9223372036854771712
STAT_V1, STAT_V2 = f"inactive_file 5\ntotal_inactive_file {GIB}\n", f"anon 7\ninactive_file {GIB}\n"

Machine = Callable[[str, dict[str, object]], None]


@pytest.fixture
def of_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes a machine of 16 GiB, of which 12 are available, and 8 cores, with these files of control groups."""

    def make(groups: str, files: dict[str, object]) -> None:
        for name, content in {"proc/self/cgroup": groups, **{f"groups/{name}": files[name] for name in files}}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(str(content))
        monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
        monkeypatch.setattr(machine, "CONTROL_GROUPS", tmp_path / "groups")
        memory = SimpleNamespace(total=16 * GIB, available=12 * GIB)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
        monkeypatch.setattr(machine, "usable_cores", lambda: list(range(8)))

    return make


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("", {}, (16, 12, "its memory")),
        # A limit of the group around this one counts too, and cached files are given up.
        (
            V2,
            {"job/memory.max": 4 * GIB, "job/memory.current": 3 * GIB, "job/memory.stat": STAT_V2,
             "job/run/memory.max": "max", "job/run/memory.current": 3 * GIB},
            (4, 2, "job/memory.max"),
        ),
        # In a container the process's path is the host's, and what is mounted is the container's own group.
        (V2, {"memory.max": 6 * GIB, "memory.current": 0}, (6, 6, "memory.max")),
        (
            V1,
            {"memory/job/run/memory.limit_in_bytes": 4 * GIB, "memory/job/run/memory.usage_in_bytes": 4 * GIB,
             "memory/job/run/memory.stat": STAT_V1,
             "memory/memory.limit_in_bytes": V1_WITHOUT_LIMIT, "memory/memory.usage_in_bytes": 9 * GIB},
            (4, 1, "memory.limit_in_bytes"),
        ),
        # More than the machine has, and what other groups use, do not count.
        (V2, {"job/run/memory.max": 64 * GIB, "job/run/memory.current": 2 * GIB}, (16, 12, "its memory")),
        (V2, {"job/run/memory.max": "", "job/run/memory.current": "much"}, (16, 12, "its memory")),
    ],
)  # fmt: skip
def test_the_least_of_machine_and_groups(
    groups: str, files: dict[str, object], expected: tuple[int, int, str], of_machine: Machine
) -> None:
    of_machine(groups, files)
    memory = host_memory()
    assert (memory.limit / GIB, memory.available / GIB) == expected[:2]
    assert memory.source.endswith(expected[2])


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        (V2, {"job/run/cpu.max": "max 100000"}, 8),
        (V2, {"job/run/cpu.max": "250000 100000"}, 3),
        (V2, {"job/run/cpu.max": "900000 100000", "job/cpu.max": "50000 100000"}, 1),
        (V1, {"cpu,cpuacct/job/run/cpu.cfs_quota_us": 200000, "cpu,cpuacct/job/run/cpu.cfs_period_us": 100000}, 2),
        (V1, {"cpu,cpuacct/job/run/cpu.cfs_quota_us": -1, "cpu,cpuacct/job/run/cpu.cfs_period_us": 100000}, 8),
    ],
)
def test_cores_by_quota(groups: str, files: dict[str, object], cores: int, of_machine: Machine) -> None:
    of_machine(groups, files)
    assert count_cores() == cores


def test_this_machines_own_figures() -> None:
    memory = host_memory()
    assert 0 < memory.available <= memory.limit and 1 <= count_cores() <= machine.machine_cores()


@pytest.mark.parametrize(
    ("words", "limit", "problem"),
    [
        (
            "--weight_sync.num_slots 10000000",
            16 * GIB,
            "weight_sync.num_slots = 10000000 .* of slots for weight versions",
        ),
        ("--inference.num_actors 100000", 16 * GIB, "inference.num_actors = 100000 .* for actors"),
        ("--training.threads 100000", 16 * GIB, "training.threads = 100000 .* at most this machine's"),
        ("--inference.threads_per_actor 100000", 16 * GIB, "threads_per_actor = 100000 .* at most this machine's"),
        ("", GIB // 4, r"the run needs at least .*, and this machine allows 256.0 MiB \(.*memory.max\)"),
    ],
)
def test_what_cannot_fit_is_refused(
    words: str, limit: int, problem: str, of_machine: Machine, write_config: WriteConfig
) -> None:
    of_machine(V2, {"job/run/memory.max": limit, "job/run/memory.current": 0})
    arguments = [*write_config(), *words.split()]
    with pytest.raises(ConfigError, match=problem) as refused:
        load_config(arguments)
    assert len(refused.value.problems) == 1
    assert load_config([*arguments, "--dry-run"]), "a plan may be for another machine"


def test_what_is_close_is_said(of_machine: Machine, write_config: WriteConfig) -> None:
    of_machine(V2, {"job/run/memory.max": GIB, "job/run/memory.current": 0})
    saves = ["--checkpoint.enable", "true", "--checkpoint.async_mode", "async"]
    config = load_config([*write_config(), "--inference.num_actors", "2", *saves])
    args = read_shape(config)
    assert args is not None
    needed = sum(host_bytes(config, args, ranks=1).values())
    estimate = estimate_memory(config, args, 1)
    assert needed > estimate.total and host_bytes(config, args, 1)["checkpoint.async_mode"] == estimate.checkpoint > 0
    of_machine(V2, {"job/run/memory.current": 0, "job/run/memory.max": needed * 2})
    assert tight_memory(config, 1) == ""
    of_machine(V2, {"job/run/memory.current": needed, "job/run/memory.max": needed * 2})
    warning = tight_memory(config, 1)
    assert "of this machine's memory" in warning and "for checkpoints that are written in the background" in warning


@pytest.mark.parametrize(
    ("flags", "flavor", "gpu", "engine", "expected"),
    [
        ("fpu avx512_bf16 avx2", "0.6B", False, "embedded", ("bfloat16", "bfloat16", "avx512_bf16")),
        ("amx_tile amx_bf16", "0.6B", False, "vllm", ("bfloat16", "bfloat16", "amx_bf16")),
        ("fpu avx2 avx512f", "0.6B", False, "embedded", ("float32", "float32", "neither")),
        ("fpu avx512_bf16", "debug", False, "embedded", ("float32", "float32", "fewer than 50,000,000")),
        # The embedded engine computes on the CPU whatever the ranks have.
        ("fpu avx2", "0.6B", True, "embedded", ("bfloat16", "float32", "neither")),
        ("fpu avx2", "debug", True, "vllm", ("bfloat16", "bfloat16", "have GPUs")),
    ],
)
def test_automatic_types_follow_from_the_processor_and_the_model(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    flavor: str,
    gpu: bool,
    engine: str,
    expected: tuple[str, str, str],
) -> None:
    (tmp_path / "cpuinfo").write_text(f"model name\t: amx_bf16 in name only\nflags\t\t: {flags}\n")
    monkeypatch.setattr(machine, "PROC", tmp_path)
    monkeypatch.setenv("TORCHTITAN_DEVICE", "cuda" if gpu else "cpu")
    config = JobConfig()
    config.model.name, config.model.flavor, config.inference.backend = "qwen3", flavor, engine
    config.training.mixed_precision_param = config.inference.dtype = "auto"
    message = choose_types(config)
    assert (config.training.mixed_precision_param, config.inference.dtype) == expected[:2]
    assert expected[2] in message
    # What is not "auto" stays, and nothing is said of it.
    assert choose_types(config) == ""
