"""What the trainer learns when a part of the synchronisation is given up."""

from __future__ import annotations

import queue
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.errors import UserError
from torchtitan.weight_sync import courier_thread
from torchtitan.weight_sync.courier_thread import CourierThread
from torchtitan.weight_sync.facade import WeightSync


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
            CourierThread("courier", arguments, "token", 3)
    else:
        courier = CourierThread("courier", arguments, "token", 3)
        courier._thread.join(20)
        assert "cannot be started again" in courier.failure and "no layout file" in courier.failure
        courier.close(time.monotonic() + 1)
    assert bells[-1].fileno() == -1, "the bell that it was made with is still open"


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
    assert "weight coordinator died" in str(ends.get(timeout=30))
    sync.close()
