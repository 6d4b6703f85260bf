"""torchrun, with the exit code of the rank that failed first and without its own tracebacks.

    python -m torchtitan.utils.launch <torchrun's arguments>

torchrun answers every failure of a rank with exit code 1, and every signal with a traceback. Here a failed rank's own
exit code is carried through, and a signal ends in 128 + its number once the ranks have gone. SIGUSR1 is passed on to
the ranks. Its folder among the temporary files goes with it, unless `--log-dir` names another. The ranks of one machine
meet at its loopback address, so its host name need not resolve; names that several machines need are looked up before
anything waits for them.

With `--max-restarts N` all ranks are started again up to N times after one was killed or broke off. The run knows by
LAUNCH_VARIABLE that it has been started before, and goes on where it was (trainer/run_dir.py).

With a range of machines (`--nnodes 1:2`) they start again, too, when a machine is lost or joins, which costs none of
these restarts.
"""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__":
    # Ctrl-C while the rest is imported, or before there is a run that answers it.
    signal.signal(signal.SIGINT, lambda *_: sys.exit(128 + signal.SIGINT))
    # Threads and ranks inherit this: a request for an export waits until somebody takes it, and ends nobody.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

from torchtitan.errors import another_package

if said := another_package():
    sys.exit(said)

import argparse
import contextlib
import math
import os
import socket
import tempfile
import threading
import time
from collections import Counter
from types import FrameType
from typing import Any

import psutil
from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing import api as processes
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher import api
from torch.distributed.run import config_from_args, parse_args, parse_min_max_nnodes, run

from torchtitan.errors import EXIT_RETRYABLE, UserError
from torchtitan.utils.child_process import LAUNCH_VARIABLE, LAUNCHER_VARIABLE, LOSS_VARIABLE

# Ranks leave within checkpoint.save_deadline_s (at most 600) by themselves; torchrun's SIGKILL is only the backstop.
SHUTDOWN_TIMEOUT_S = 630
# What a rank ends with that has said what a person has to change: it would only say so again.
FINAL_CODES = (1, 2)
STOPPED_S = 10
LOOPBACK = "127.0.0.1"
# How long the name of rank 0's machine may stay unknown: a cluster may publish it only once that machine is up.
NAME_TIMEOUT_S = 60.0
NAME_INTERVAL_S = 1.0


class WrongArguments(UserError):
    """torchrun's arguments are not what they should be. Exit code 2, as for those that it does not know."""

    exit_code = 2


class Agent(local_elastic_agent.LocalElasticAgent):
    """torchrun's own, which restarts only where another try may help, and tells the ranks why."""

    address: str = ""
    """What this machine is called among others; given where their number may change"""

    ranks: tuple[int, ...] = ()
    """Process ids"""
    started = threading.Event()
    """Set while the ranks named by `ranks` are those that run"""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._stopped: dict[int, float] = {}
        """Process ids of stopped ranks, and when that was seen first; inf once it was said"""
        self._machines: Counter[str] = Counter()
        """The machines that meet, where their number may change"""
        self._failed = False
        """Whether the ranks start again because some have failed, which has cost a restart"""

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        if not Agent.address:
            return
        # Each meeting has a store of its own.
        store: Any = worker_group.store
        count: Any = worker_group.group_world_size
        store.set(f"machine/{worker_group.group_rank}", Agent.address)
        before, self._machines = self._machines, Counter(store.get(f"machine/{n}").decode() for n in range(count))
        lost, joined = before - self._machines, self._machines - before
        if before and (lost or joined):
            changes = [f"machine {name} was lost" for name in sorted(lost.elements())]
            changes += [f"machine {name} has joined" for name in sorted(joined.elements())]
            os.environ[LOSS_VARIABLE] = f"{', '.join(changes)} ({count} train on, {before.total()} did before)"
            _say(f"{os.environ[LOSS_VARIABLE]}: all ranks start again, which costs no restart")
            if self._failed:
                # The ranks that are left have failed because of it.
                self._remaining_restarts += 1
        self._failed = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        started: dict[int, int] = super()._start_workers(worker_group)
        Agent.ranks = tuple(started.values())
        Agent.started.set()
        return started

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        Agent.started.clear()
        super()._stop_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        self.name_stopped()
        if result.state is WorkerState.FAILED:
            if any(failure.exitcode in FINAL_CODES for failure in result.failures.values()):
                self._remaining_restarts = 0
            rank, first = min(result.failures.items(), key=lambda item: item[1].timestamp)
            self._failed = self._remaining_restarts > 0
            if self._failed:
                os.environ[LOSS_VARIABLE] = f"rank {rank} {_end_of(first.exitcode)}"
                _say(f"{os.environ[LOSS_VARIABLE]}: all ranks start again ({self._remaining_restarts} restarts left)")
        return result

    def name_stopped(self) -> None:
        """Say once of each rank that it has been stopped (SIGSTOP) for STOPPED_S: the others only wait for it."""
        now = time.monotonic()
        for number, rank in enumerate(Agent.ranks):
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(rank).status() != psutil.STATUS_STOPPED:
                    self._stopped.pop(rank, None)
                elif now - self._stopped.setdefault(rank, now) >= STOPPED_S:
                    self._stopped[rank] = math.inf
                    _say(f"local rank {number} has been stopped for {STOPPED_S} s: kill -CONT {rank} continues it")


def main(arguments: list[str]) -> int:
    """Run torchrun with these arguments and return the exit code."""
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_TIMEOUT_S))
    # torchrun counts the ranks of each machine from 0.
    os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${role_name}${rank}]:")
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    api.LocalElasticAgent = Agent  # type: ignore[attr-defined]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
        os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGQUIT")
    processes._terminate_process_handler = _stop
    threading.Thread(target=_pass_on, name="pass-on", daemon=True).start()
    torchrun.config_from_args = _config_of  # type: ignore[assignment]
    parsed = parse_args(arguments)
    try:
        least, most = machines_of(parsed)
        if least < most:
            Agent.address = parsed.local_addr or socket.getfqdn()
            # Ranks that meet in the store of the launchers before would find what the ones before have left there.
            os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        find_names(parsed)
    except UserError as error:
        _say(str(error))
        return error.exit_code
    except TimeoutError as error:
        _say(str(error))
        return EXIT_RETRYABLE
    try:
        with tempfile.TemporaryDirectory(prefix="torchelastic_", ignore_cleanup_errors=True) as folder:
            # The link to the run's folder goes with this one; of a launch that a person has named it stays.
            os.environ.setdefault(LAUNCH_VARIABLE, f"{folder}/run")
            parsed.log_dir = parsed.log_dir or folder
            run(parsed)
    except UserError as error:
        _say(str(error))
        return error.exit_code
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        _say(f"rank {rank} failed first: it {_end_of(failure.exitcode)}")
        # Popen reports death by signal n as -n, shells as 128 + n.
        return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    except SignalException as error:
        _say(f"stopped by {error.sigval.name}")
        return 128 + error.sigval
    except (DistError, RendezvousError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        where = parsed.rdzv_endpoint or f"{parsed.master_addr}:{parsed.master_port}"
        _say(
            f"the machines' launchers do not meet at {where} ({reason}): that of rank 0 has ended, "
            "and its output says why, or it was not reached in time"
        )
        return EXIT_RETRYABLE
    return 0


def machines_of(parsed: argparse.Namespace) -> tuple[int, int]:
    """Return the least and the largest number of machines. Raises WrongArguments."""
    try:
        least, most = parse_min_max_nnodes(parsed.nnodes)
    except (ValueError, RuntimeError):
        least, most = 0, 0
    if not 0 < least <= most:
        raise WrongArguments(f"--nnodes {parsed.nnodes}: it must be a number of machines, or MIN:MAX, from 1 on")
    return least, most


def host_of(endpoint: str) -> str:
    """Return the host in `host:port`. Raises WrongArguments."""
    try:
        return str(parse_rendezvous_endpoint(endpoint, default_port=0)[0])
    except ValueError as error:
        raise WrongArguments(f"--rdzv-endpoint {endpoint}: {error}") from None


def _config_of(parsed: argparse.Namespace) -> Any:
    """What torchrun makes of its arguments. Raises WrongArguments."""
    try:
        return config_from_args(parsed)
    except (ValueError, AssertionError, RuntimeError) as error:
        raise WrongArguments(f"torchrun's arguments: {error}") from None


def find_names(parsed: argparse.Namespace) -> None:
    """Let the ranks of one machine meet at its loopback address, and look up the names that several machines need.

    torchrun tells the ranks this machine's host name otherwise, and waits for minutes where that does not resolve.

    Raises:
        UserError: the ranks of other machines would be told a name of this machine that does not resolve, or an
            argument is malformed.
        TimeoutError: the name of rank 0's machine is still unknown after NAME_TIMEOUT_S.
    """
    endpoint = parsed.rdzv_endpoint
    host = host_of(endpoint) if endpoint else parsed.master_addr
    if parsed.standalone or machines_of(parsed)[1] == 1:
        parsed.local_addr = parsed.local_addr or LOOPBACK
        return
    # With other backends than "static", rank 0's machine tells the others its address by itself.
    if parsed.rdzv_backend != "static" and (problem := _lookup_problem(own := parsed.local_addr or socket.getfqdn())):
        raise UserError(
            f"this machine's name {own} does not resolve ({problem}), and the ranks would be told to meet there: give "
            "--local-addr with an address of this machine that the others reach, or add the name to /etc/hosts"
        )
    key = "--rdzv-endpoint" if endpoint else "--master-addr"
    deadline, announced = time.monotonic() + NAME_TIMEOUT_S, False
    while problem := _lookup_problem(host):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{key}: {host} still does not resolve after {NAME_TIMEOUT_S:g} s ({problem})")
        if not announced:
            _say(f"{key}: {host} does not resolve on {socket.gethostname()} ({problem}): trying {NAME_TIMEOUT_S:g} s")
            announced = True
        time.sleep(NAME_INTERVAL_S)


def _lookup_problem(host: str) -> str:
    """Return why a name does not resolve; empty if it does, or if it is an address."""
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def _stop(signum: int, frame: FrameType | None) -> None:
    """As torchrun's own handler, but a terminal that closes may say so twice, and the second would end us at once."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise SignalException(f"stopped by {signum}", sigval=signal.Signals(signum))


def _pass_on() -> None:
    while True:
        number = signal.sigwait({signal.SIGUSR1})
        # A request that comes before there are ranks, or while they are started again, is for those that come.
        Agent.started.wait()
        for rank in Agent.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, number)


def _end_of(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.write(2, f"[launch] {text}\n".encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
