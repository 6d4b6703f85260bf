"""Run a function on several ranks: processes of their own, gloo on loopback, one deadline.

    results = run_distributed("tests.unit_tests.distributed.test_parallel:train_step", 2, layouts=[...])

The function runs on every rank with the process group up and the keyword arguments as given (JSON); what it returns
(JSON again) comes back in rank order. A rank that fails ends the others, and its traceback is the error.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent


class WorkerFailure(AssertionError):
    """A rank failed or the deadline passed; the message holds what the ranks wrote."""


def run_distributed(
    function: str, world_size: int, timeout: float = 240.0, python: str | Path = sys.executable, **kwargs: Any
) -> list[Any]:
    """Call `module:function`(**kwargs) on `world_size` ranks of `python`; returns one result per rank.

    Raises WorkerFailure with the output of the ranks that failed, or of all of them when `timeout` seconds passed.
    """
    import torch.distributed as dist

    # The parent holds the store, as torchrun's agent does: no free port has to be guessed.
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout), use_libuv=True
    )
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[subprocess.Popen[bytes]] = []
        logs = [Path(folder) / f"log{rank}" for rank in range(world_size)]
        results = [Path(folder) / f"result{rank}.json" for rank in range(world_size)]
        try:
            for rank in range(world_size):
                environment = os.environ | {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "LOCAL_WORLD_SIZE": str(world_size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(store.port),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                    "TORCHTITAN_DEVICE": "cpu",
                    "OMP_NUM_THREADS": "1",
                }
                command = [str(python), "-m", "tests.distributed_launcher", function, str(results[rank])]
                with logs[rank].open("wb") as log:
                    worker = subprocess.Popen(
                        command,
                        cwd=REPOSITORY,
                        env=environment,
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                ranks.append(worker)
                assert worker.stdin is not None
                worker.stdin.write(json.dumps(kwargs).encode())
                worker.stdin.close()
            failed = _wait(ranks, time.monotonic() + timeout)
        finally:
            for worker in ranks:
                worker.kill()
                worker.wait()
        if failed:
            texts = [f"--- rank {rank} of {world_size}:\n{logs[rank].read_text()[-6000:]}" for rank in failed]
            raise WorkerFailure(f"{function} failed or ran past {timeout} s\n" + "\n".join(texts))
        return [json.loads(path.read_text()) for path in results]


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float) -> list[int]:
    """Ranks that failed; at the deadline those still running. The others get a moment to fail with a reason too."""
    while time.monotonic() < deadline:
        codes = [worker.poll() for worker in ranks]
        if all(code is not None for code in codes) or any(codes):
            break
        time.sleep(0.02)
    if any(worker.poll() for worker in ranks):
        grace = time.monotonic() + 3
        while time.monotonic() < grace and any(worker.poll() is None for worker in ranks):
            time.sleep(0.02)
        return [rank for rank, worker in enumerate(ranks) if worker.poll()]
    return [rank for rank, worker in enumerate(ranks) if worker.poll() is None]


def _main() -> None:
    import torch

    from torchtitan.config.job_config import Comm
    from torchtitan.distributed import device
    from torchtitan.utils.machine import leave

    module, name = sys.argv[1].split(":")
    kwargs = json.load(sys.stdin)
    torch.set_num_threads(1)
    device.init_process_group(Comm(init_timeout_seconds=60))
    result = getattr(importlib.import_module(module), name)(**kwargs)
    Path(sys.argv[2]).write_text(json.dumps(result))
    device.shutdown()
    leave(0)


if __name__ == "__main__":
    _main()
