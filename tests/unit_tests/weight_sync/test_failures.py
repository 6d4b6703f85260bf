"""What the trainer learns when a part of the synchronisation is given up."""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.patience import PATIENCE_S
from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.errors import UserError
from torchtitan.weight_sync import courier as real_courier
from torchtitan.weight_sync import courier_thread, delta_encoder, launch
from torchtitan.weight_sync.courier_thread import CourierThread
from torchtitan.weight_sync.facade import WeightSync
from torchtitan.weight_sync.publisher import Publisher
from torchtitan.weight_sync.transports import disk_store


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Courier:
    """Made once; after that it cannot be."""

    made = 0

    def __init__(self, arguments: dict[str, Any], _token: str):
        Courier.made += 1
        if Courier.made > arguments["how_often"]:
            raise OSError("no layout file")

    def run(self) -> None:
        raise RuntimeError("on purpose")

    def stop(self) -> None:
        """It has ended."""


@pytest.mark.parametrize("how_often", [0, 1])
def test_a_courier_that_cannot_be_made_is_told_and_leaves_no_bell(
    how_often: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(courier_thread, "Courier", Courier)
    monkeypatch.setattr(Courier, "made", 0)
    bells: list[socket.socket] = []

    def arguments() -> dict[str, Any]:
        bells.append(socket.socket())
        return {"bell": bells[-1], "how_often": how_often}

    if how_often == 0:
        with pytest.raises(OSError, match="no layout file"):
            CourierThread("courier", arguments, "token", 3, lambda: 0)
    else:
        courier = CourierThread("courier", arguments, "token", 3, lambda: 0)
        courier._thread.join(PATIENCE_S)
        assert "cannot be started again" in courier.failure and "no layout file" in courier.failure
        courier.close(time.monotonic() + 1)
    assert bells[-1].fileno() == -1, "the bell that it was made with is still open"


def begin_to_hang(
    what: str, courier: real_courier.Courier, publisher: Publisher, hang: Callable[..., Any], patch: pytest.MonkeyPatch
) -> None:
    """Have one of the courier's threads call hang(), in the midst of what it does."""
    call = courier._loop.call_from_thread
    if what == "checksums":
        patch.setattr(courier, "_checksum", hang)
    if what == "deltas":
        patch.setattr(delta_encoder, "encode", hang)
    if what == "files":
        patch.setattr(disk_store, "_write_all", hang)
    assert publisher.reserve()
    publisher.snapshot(version=0, serial=1)
    wait_for(lambda: 1 in courier._keeper.filled())
    if what == "loop":
        call(lambda: hang())
    if what == "deltas":
        memory = memoryview(bytes(8))
        call(lambda: courier._deltas.version((2, 1), memory, memory) and None)
    if what == "files":
        call(lambda: courier._write_file({"serial": 1, "digest": "d", "layout_id": "l"}))


@pytest.mark.parametrize("what", ["loop", "checksums", "deltas", "files"])
def test_a_courier_thread_that_hangs_is_told(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two seconds without a beat are a hang, and half a second is the longest piece of work.
    monkeypatch.setattr(real_courier, "PARENT_CHECK_SECONDS", 0.02)
    monkeypatch.setattr(real_courier, "LONGEST_CHECKSUM_SECONDS", 0.5)
    monkeypatch.setattr(delta_encoder, "LONGEST_BUCKET_SECONDS", 0.5)
    monkeypatch.setattr(disk_store, "LONGEST_WRITE_SECONDS", 0.5)
    monkeypatch.setattr(launch, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(launch, "FROZEN_LOOKS", 40)
    publisher = Publisher(
        {"p": torch.zeros(64)}, rank=0, dtype="float32", num_slots=2, bucket_bytes=1024, folder=tmp_path
    )
    layout_file = tmp_path / "layout.json"
    layout_file.write_text(json.dumps(publisher.layout.to_json()))
    released = threading.Event()

    def arguments() -> dict[str, Any]:
        return {
            "rank": 0, "world_size": 1, "epoch": "e", "coordinator": "127.0.0.1:1", "progress_timeout_s": 5.0,
            "transport": "disk" if what == "files" else "tcp", "streams": 1,
            "options": {"disk_path": str(tmp_path / "files")}, "layout_file": str(layout_file),
            "slots": publisher.slots, "bell": publisher.courier_bell.dup(),
        }  # fmt: skip

    def hang(*_: object) -> str:
        assert released.wait(PATIENCE_S)
        return ""

    courier = CourierThread("courier", arguments, "token", 3, lambda: publisher.slots.pulse)
    try:
        wait_for(lambda: publisher.slots.pulse > 3)
        assert not courier.failure
        begin_to_hang(what, courier._courier, publisher, hang, monkeypatch)
        wait_for(lambda: bool(courier.failure))
        assert "courier has shown no sign of life for 2 s" in courier.failure
        still = publisher.slots.pulse
        released.set()
        wait_for(lambda: publisher.slots.pulse > still)
    finally:
        released.set()
        courier.close(time.monotonic() + PATIENCE_S)
        publisher.close()


def test_a_wait_ends_when_the_coordinator_is_given_up(tmp_path: Path) -> None:
    config = WeightSyncConfig(transport="ipc", max_restarts=0)
    sync = WeightSync(config, {"p": torch.zeros(8)}, epoch="e1-test", token="token", run_dir=tmp_path)
    ends: queue.Queue[Exception] = queue.Queue()

    def wait() -> None:
        try:
            sync.wait_until_applied(0, timeout=600, at_least=1)
        except UserError as error:
            ends.put(error)

    threading.Thread(target=wait, daemon=True).start()
    assert sync._coordinator is not None
    sync._coordinator.supervised.process.kill()
    assert "weight coordinator died" in str(ends.get(timeout=PATIENCE_S))
    sync.close()
