"""Addresses of servers, and lists of a cluster's nodes."""

from __future__ import annotations

import pytest

from tests.unit_tests.conftest import WriteConfig
from torchtitan.config.slurm import nodes, slurm_urls
from torchtitan.errors import ConfigError
from torchtitan.preflight.validate import load_config


def test_servers_elsewhere_need_a_registry_that_they_reach(write_config: WriteConfig) -> None:
    elsewhere = ["--weight_sync.host", "10.0.0.1", "--inference.servers", "http://10.0.0.5:8000", "http://127.0.0.1:80"]
    assert load_config([*write_config(), *elsewhere]).weight_sync.host == "10.0.0.1"
    for wildcard in ("0.0.0.0", "::", " "):
        with pytest.raises(ConfigError, match="weight_sync.host"):
            load_config([*write_config(), "--weight_sync.host", wildcard])


def test_servers_on_this_machine_are_allowed(write_config: WriteConfig) -> None:
    servers = ["http://127.0.0.1:8000", "http://localhost:8001/", "http://[::1]:8002"]
    assert load_config([*write_config(), "--inference.servers", *servers]).inference.servers == servers


def test_slurm_node_lists_become_urls(write_config: WriteConfig) -> None:
    servers = ["slurm:gpu[01-03,7],login:8000-8001", "http://10.0.0.5:1"]
    config = load_config([*write_config(), "--weight_sync.host", "10.0.0.1", "--inference.servers", *servers])
    nodes = ["gpu01", "gpu02", "gpu03", "gpu7", "login"]
    assert config.inference.servers == [
        *(f"http://{node}:{port}" for node in nodes for port in (8000, 8001)),
        "http://10.0.0.5:1",
    ]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("a", "a"),
        ("a,b.cluster", "a b.cluster"),
        ("a[9-11]", "a9 a10 a11"),
        ("r[1-2]n[08-10]x", "r1n08x r1n09x r1n10x r2n08x r2n09x r2n10x"),
        ("a[1,3-4],b[007]", "a1 a3 a4 b007"),
    ],
)
def test_slurm_notation(expression: str, expected: str) -> None:
    # What `scontrol show hostnames` says of the same expressions.
    assert list(nodes(expression)) == expected.split()


@pytest.mark.parametrize("expression", ["", "a,", "a[1", "a]1", "a[]", "a[x]", "a b", "a[1-99999]", "a[[1]]", "a/b"])
def test_wrong_slurm_notation(expression: str) -> None:
    with pytest.raises(ValueError, match="not a node|not a list|not a range"):
        list(nodes(expression))


def test_more_servers_than_anyone_has_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="more than 4096 servers"):
        slurm_urls("slurm:a[1-4000]b[1-4000]c[1-4000]:8000")
