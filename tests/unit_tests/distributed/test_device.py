"""Which address each rank uses: chosen, said, and refused where other machines cannot reach it; and which cores."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from torchtitan.config.job_config import Comm
from torchtitan.distributed import device
from torchtitan.errors import ConfigError, UserError
from torchtitan.utils import addresses

HERE = {"lo": "127.0.0.1", "eth0": "10.0.0.8", "ib0": "192.168.1.8"}
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has these interfaces, and no variables that name one; call it with the address that leads to rank 0."""
    monkeypatch.setenv(addresses.GLOO_VARIABLE, "")
    monkeypatch.delenv(addresses.GLOO_VARIABLE)
    listed = {name: [SimpleNamespace(family=socket.AF_INET, address=address)] for name, address in HERE.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: listed)
    return lambda local_address: monkeypatch.setattr(addresses, "address_towards", lambda leader: local_address)


def test_gloo_takes_the_interface_towards_rank_0(machine: Callable[[str], None]) -> None:
    machine("10.0.0.8")
    assert addresses.choose_interface("gpu1") == "10.0.0.8 (eth0)"
    assert os.environ[addresses.GLOO_VARIABLE] == "eth0"


def test_the_interface_of_the_environment_is_used(
    machine: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(addresses.GLOO_VARIABLE, "ib0")
    assert addresses.choose_interface("gpu1") == "192.168.1.8 (ib0)"
    assert os.environ[addresses.GLOO_VARIABLE] == "ib0"


def test_an_unreachable_address_is_refused_with_the_interfaces_there_are(
    machine: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("127.0.1.1")  # as Debian has a machine's own name in /etc/hosts
    with pytest.raises(UserError, match="'gpu1' is 127.0.1.1 .*GLOO_SOCKET_IFNAME to one of: .*eth0 10.0.0.8"):
        addresses.choose_interface("gpu1")
    monkeypatch.setenv(addresses.GLOO_VARIABLE, "ib9")
    with pytest.raises(UserError, match="GLOO_SOCKET_IFNAME = 'ib9': .* ib0 192.168.1.8"):
        addresses.choose_interface("gpu1")


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' .* from 1 on"),
        ({"RANK": "1"}, "RANK=1 .* WORLD_SIZE = 1"),
        ({"WORLD_SIZE": "2", "RANK": ""}, "RANK=''"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "-1"}, "LOCAL_WORLD_SIZE='-1'"),
        ({"WORLD_SIZE": "2", "MASTER_PORT": "http"}, "MASTER_PORT='http'"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": ""}, "MASTER_ADDR is not"),
    ],
)
def test_variables_that_torchrun_would_not_set_so_are_named(
    variables: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**plain, addresses.GLOO_VARIABLE: "lo", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=named):
        device.init_process_group(Comm())
        device.rank()


@pytest.mark.slow
def test_ranks_of_three_machines_are_numbered_by_node_meet_and_say_where(tmp_path: Path) -> None:
    """Launchers at three addresses, as three machines would have them; the second start of all ranks meets, too."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys\n"
        "from torchtitan.config.job_config import Comm\n"
        "from torchtitan.distributed import device\n"
        "address = device.init_process_group(Comm())\n"
        "open(f'{sys.argv[1]}/{device.rank()}', 'a').write(f'{os.environ[\"GROUP_RANK\"]} at {address}, ')\n"
        "os._exit(75 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.8", 0))
        port = free.getsockname()[1]
    launch = [sys.executable, "-m", "torchtitan.utils.launch", "--nnodes", "3", "--nproc-per-node", "1"]
    launch += ["--master-addr", "127.0.0.8", "--master-port", str(port), "--max-restarts", "1"]
    launchers = [
        subprocess.Popen(
            [*launch, "--node-rank", str(rank), "--local-addr", f"127.0.0.{8 + rank}", str(script), str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "TORCHTITAN_DEVICE": "cpu"},
        )
        for rank in (2, 1, 0)
    ]
    assert [launcher.wait(240) for launcher in launchers] == [0, 0, 0]
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == [
        f"{rank} at 127.0.0.1 (lo), " * 2 for rank in range(3)
    ]


@pytest.mark.parametrize(("beside", "share"), [(0, 4), (1, 3), (30, 1)])
def test_the_ranks_of_this_machine_share_its_cores(beside: int, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the other machines have cores of their own."""
    monkeypatch.setenv("WORLD_SIZE", "32")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(device, "count_cores", lambda: 16)
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    assert device.set_threads(0, beside) == share and asked == [share]


@pytest.mark.parametrize(
    ("where", "variable", "grow"), [("cuda", "", True), ("cuda", "backend:native", False), ("cpu", "", False)]
)
def test_segments_grow_on_gpus_unless_the_environment_says_how(
    where: str, variable: str, grow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append)
    monkeypatch.setattr(device, "device", lambda: torch.device(where))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", variable)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    device.set_allocators("expandable_segments:True")
    assert asked == ["expandable_segments:True"] * grow
