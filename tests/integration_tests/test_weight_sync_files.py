"""The disk transport with real processes: damaged files, a full disk, and a reader that knows nothing of all this."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integration_tests.test_weight_sync import FAULTS, Served, running_job
from tests.integration_tests.weight_sync_actor import parameter_values
from tests.patience import PATIENCE_S
from torchtitan.weight_sync.weight_files import read_weights


def check_latest(folder: Path, version: int) -> None:
    found = read_weights(folder / "latest")
    assert found.version == version
    assert all(torch.equal(tensor, parameter_values(version, int(name[1:]))) for name, tensor in found.tensors.items())


def test_damaged_files_are_refused_and_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ["corrupt:phase=write,version=1", "drop:phase=write,version=2,bucket=3", "full_disk:version=3"]
    monkeypatch.setenv(FAULTS, ";".join([*plan, "reset:version=4,actor=a"]))
    engines = {"a": Served(), "b": Served()}
    with running_job(tmp_path, transport="disk") as job:
        for name, engine in engines.items():
            job.receive(name, engine)
        for version in range(6):
            assert job.step() == "published"
            assert job.sync.wait_until_applied(version, PATIENCE_S, at_least=2).applied == {"a", "b"}
        job.wait_for(lambda: read_weights(tmp_path / "weights" / "latest").version == 5)

        def told(reason: str) -> bool:
            return any(reason in record["reason"] for record in job.journal("abort"))

        for reason in ("checksum", "truncated", "No space left on device", "reset"):
            job.wait_for(lambda reason=reason: told(reason))  # type: ignore[misc]
        assert not job.journal("evict")
        check_latest(tmp_path / "weights", 5)
        assert len(list((tmp_path / "weights").glob("*/version-*"))) <= 5
    assert all(engine.versions == list(range(6)) for engine in engines.values())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_training_goes_on_while_the_run_folder_is_full(small_disk: Path) -> None:
    """Not even the coordinator can write its journal; a version takes 0.7 MB."""
    engine = Served()
    with running_job(small_disk, transport="disk") as job:
        job.receive("a", engine)
        job.step()
        assert job.sync.wait_until_applied(0, PATIENCE_S, at_least=1).applied == {"a"}
        with (small_disk / "filler").open("wb", buffering=0) as filler:
            with pytest.raises(OSError, match="No space left"):
                while True:
                    filler.write(bytes(4096))
            for _ in range(20):
                job.step()
                assert not job.sync.wait_until_applied(job.version, 0.1).applied
            assert job.sync.actors()["a"].version == 0
            check_latest(small_disk / "weights", 0)
            filler.truncate(0)
        job.step()
        job.wait_for(lambda: job.sync.actors()["a"].version == job.sync.published_version)
        job.wait_for(lambda: read_weights(small_disk / "weights" / "latest").version == job.sync.published_version)
        assert job.sync._coordinator is not None
        assert job.sync._coordinator.supervised.restarts == job.sync._courier.restarts == 0
        assert not list((small_disk / "weights").glob("**/.*"))
    assert None not in engine.versions
