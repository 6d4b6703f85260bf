"""Three hosts as network namespaces: two trainer nodes and an inference node behind 1 Gbit/s and 1 ms (where the kernel
can delay), between which everything is dropped but the ports that the configuration fixes. Actors dial the trainer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.namespaces import Namespaces, slow_network
from tests.journals import deliveries_of
from tests.processes import ROOT, Processes
from tests.runs import RUN_SECONDS
from torchtitan.inference.actor_client import TOKEN_VARIABLE
from torchtitan.utils.json_lines import read_json_lines

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(2 * RUN_SECONDS)]

TRAINERS = ("trainer0", "trainer1")
MASTER, SYNC, ACTOR = 29400, 7000, 8000
STEPS = 3


@pytest.fixture(scope="module")
def hosts() -> Iterator[Namespaces]:
    network = slow_network([*TRAINERS, "inference"], 1000.0, 1.0)
    try:
        made = network.__enter__()
    except SystemExit as error:
        pytest.skip(str(error))
    try:
        # Of rank 0's machine the registry and a shard server, of the other machine a shard server.
        made.close_to("trainer0", "inference", f"{SYNC}-{SYNC + 1}", f"{ACTOR}")
        made.close_to("trainer1", "inference", f"{SYNC + 1}")
        made.close_to("inference", "trainer0", f"{ACTOR}", f"{SYNC}-{SYNC + 1}")
        made.close_to("inference", "trainer1", "", f"{SYNC + 1}")
        yield made
    finally:
        network.__exit__(None, None, None)


class Trainers:
    """A node of one rank on each of the trainers' hosts."""

    def __init__(self, hosts: Namespaces, processes: Processes, checkpoint: Path, dump: Path, sync_host: str):
        self.processes, self.dump = processes, dump
        self.nodes = [
            processes.start(
                name,
                [
                    *hosts.prefix(name), sys.executable, "-m", "torchtitan.utils.launch",
                    "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(rank),
                    "--master-addr", hosts.addresses["trainer0"], "--master-port", str(MASTER),
                    "--local-addr", hosts.addresses[name], "-m", "torchtitan.grpo_train",
                    "--job.config_file", ROOT / "train_configs" / "debug_cpu.toml", "--job.dump_folder", dump,
                    "--model.hf_assets_path", checkpoint,
                    "--training.steps", str(STEPS), "--training.global_batch_size", "32", "--training.threads", "1",
                    "--checkpoint.enable", "false", "--eval.num_prompts", "0", "--metrics.log_freq", "1",
                    "--weight_sync.host", sync_host, "--weight_sync.port", str(SYNC),
                    "--inference.servers", f"http://{hosts.addresses['inference']}:{ACTOR}",
                ],
                GLOO_SOCKET_IFNAME="eth0", **{TOKEN_VARIABLE: "a token"},
            )
            for rank, name in enumerate(TRAINERS)
        ]  # fmt: skip

    def log(self) -> str:
        return "".join(self.processes.log(name).read_text(errors="replace") for name in TRAINERS)


def test_fixed_ports_are_all_that_a_run_needs(
    hosts: Namespaces, processes: Processes, debug_checkpoint: Path, tmp_path: Path
) -> None:
    address = hosts.addresses["inference"]
    processes.start_server(
        "actor",
        [
            *hosts.prefix("inference"), sys.executable, "-m", "torchtitan.inference.engines.embedded", "--threads", "1",
            "--model", debug_checkpoint, "--host", address, "--port", str(ACTOR), "--token-env", TOKEN_VARIABLE,
        ],
        **{TOKEN_VARIABLE: "a token"},
    )  # fmt: skip
    run = Trainers(hosts, processes, debug_checkpoint, tmp_path, hosts.addresses["trainer0"])
    metrics = tmp_path / "latest" / "metrics.jsonl"
    processes.wait("trainer0", metrics.exists, RUN_SECONDS)
    dial = f"import socket; socket.create_connection(({hosts.addresses['trainer0']!r}, {MASTER}), 1.0)"
    stranger = [*hosts.prefix("inference"), sys.executable, "-c", dial]
    assert b"timed out" in subprocess.run(stranger, capture_output=True, timeout=60).stderr
    assert [node.wait(RUN_SECONDS) for node in run.nodes] == [0, 0], run.log()
    rows = [row for row in read_json_lines(metrics) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    # Not more than a version old when it was trained on: it came through the firewall, from both machines.
    assert max(line["version"] for line in deliveries_of(tmp_path / "latest", "applied")) >= STEPS - 2


def test_name_of_the_loopback_interface_ends_with_one_message(
    hosts: Namespaces, processes: Processes, debug_checkpoint: Path, tmp_path: Path
) -> None:
    """As Debian has it in /etc/hosts: others would look for the registry on their own machines."""
    hosts.name_hosts("trainer0", {"localhost": "127.0.0.1", "trainer0": "127.0.1.1"})
    run = Trainers(hosts, processes, debug_checkpoint, tmp_path, "trainer0")
    assert run.nodes[0].wait(RUN_SECONDS) not in (0, None)
    assert run.nodes[1].wait(RUN_SECONDS) != 0
    log = run.log()
    assert log.count("weight_sync.host = trainer0 is 127.0.1.1 on") == 1 and "Traceback" not in log, log
