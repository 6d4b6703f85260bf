"""Run a function on several ranks: processes of their own, gloo on loopback, one deadline.

    results = run_distributed("tests.unit_tests.distributed.test_parallel:train_step", 2, layouts=[...])

The function runs on every rank with the process group up and the keyword arguments as given (JSON); what it returns
(JSON again) comes back in rank order. A rank that fails ends the others, and its traceback is the error.

Ranks are forks of one process that has imported torch and the function's module: most functions take less time than
that, and there are a hundred ranks in a run of all tests.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
# Python -> the process that forks ranks of it; one run at a time.
_LAUNCHERS: dict[str, subprocess.Popen[str]] = {}
_LOCK = threading.Lock()


class WorkerFailure(AssertionError):
    """A rank failed or the deadline passed; the message holds what the ranks wrote."""


def run_distributed(
    function: str,
    world_size: int,
    timeout: float = 240.0,
    python: str | Path = sys.executable,
    where: str = "cpu",
    **kwargs: Any,
) -> list[Any]:
    """Call `module:function`(**kwargs) on `world_size` ranks of `python` on a device; returns one result per rank.

    Raises WorkerFailure with the output of the ranks that failed, or of all of them when `timeout` seconds passed.
    """
    import torch.distributed as dist

    # The parent holds the store, as torchrun's agent does: no free port has to be guessed.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout), use_libuv=True
    )
    environment = os.environ | {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHTITAN_DEVICE": where,
        "OMP_NUM_THREADS": "1",
    }
    job = {"function": function, "ranks": world_size, "timeout": timeout, "environment": environment, "kwargs": kwargs}
    with _LOCK:
        launcher = _launcher(str(python))
        assert launcher.stdin is not None and launcher.stdout is not None
        try:
            print(json.dumps(job), file=launcher.stdin, flush=True)
            reply = launcher.stdout.readline()
        except BaseException:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
            raise
    if not reply:
        raise WorkerFailure(f"{function}: what starts its ranks ended with {launcher.wait()}, see standard error")
    answer = json.loads(reply)
    if answer["failed"]:
        raise WorkerFailure(f"{function} failed or ran past {timeout} s\n" + "\n".join(answer["failed"]))
    results: list[Any] = answer["results"]
    return results


def _launcher(python: str) -> subprocess.Popen[str]:
    """It ends when its standard input does, with this process."""
    launcher = _LAUNCHERS.get(python)
    if launcher is None or launcher.poll() is not None:
        launcher = _LAUNCHERS[python] = subprocess.Popen(
            [python, "-m", "tests.distributed_launcher"],
            cwd=REPOSITORY,
            # The process that forks must not start CUDA by asking whether there is a GPU.
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    return launcher


def _run_ranks(job: dict[str, Any]) -> dict[str, list[Any]]:
    """What they return, or what those wrote that failed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [
            multiprocessing.get_context("fork").Process(target=_rank, args=(job, rank, folder))
            for rank in range(job["ranks"])
        ]
        try:
            for rank in ranks:
                rank.start()
            failed = _wait(ranks, time.monotonic() + job["timeout"])
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        written = [
            f"--- rank {rank} of {len(ranks)}:\n{(folder / f'log{rank}').read_text()[-6000:]}" for rank in failed
        ]
        results = [] if failed else [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(ranks))]
        return {"failed": written, "results": results}


def _wait(ranks: list[BaseProcess], deadline: float) -> list[int]:
    """Ranks that failed; at the deadline those still running. The others get a moment to fail with a reason too."""
    while time.monotonic() < deadline:
        codes = [rank.exitcode for rank in ranks]
        if all(code is not None for code in codes) or any(codes):
            break
        time.sleep(0.02)
    if any(rank.exitcode for rank in ranks):
        grace = time.monotonic() + 3
        while time.monotonic() < grace and any(rank.exitcode is None for rank in ranks):
            time.sleep(0.02)
        return [number for number, rank in enumerate(ranks) if rank.exitcode]
    return [number for number, rank in enumerate(ranks) if rank.exitcode is None]


def _rank(job: dict[str, Any], rank: int, folder: Path) -> None:
    log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(job["environment"], RANK=str(rank), LOCAL_RANK=str(rank))
    import torch

    from torchtitan.config.job_config import Comm
    from torchtitan.distributed import device
    from torchtitan.utils.machine import leave

    module, name = job["function"].split(":")
    torch.set_num_threads(1)
    device.init_process_group(Comm())
    result = getattr(importlib.import_module(module), name)(**job["kwargs"])
    (folder / f"{rank}.json").write_text(json.dumps(result))
    device.shutdown()
    leave(0)


def _serve() -> None:
    """Jobs come as lines of JSON, and so do answers go; what else is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Here, and so once for all ranks and runs: what sharded models import when they are made, and each job's module.
    importlib.import_module("torch._dynamo")
    for line in sys.stdin:
        job = json.loads(line)
        if '"compile.enable": true' in line:  # what compiling imports, which takes two seconds
            importlib.import_module("torch._inductor.compile_fx")
        importlib.import_module(job["function"].partition(":")[0])
        print(json.dumps(_run_ranks(job)), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
