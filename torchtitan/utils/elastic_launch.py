"""torchrun, with the exit code of the rank that failed first and without its own tracebacks: for several machines, and
for options that only torchrun has. utils/launch.py starts the ranks of one machine without it.

torchrun answers every failure of a rank with exit code 1, and every signal with a traceback. Its folder among the
temporary files goes with it, unless `--log-dir` names another. Names that several machines need are looked up before
anything waits for them. With a range of machines (`--nnodes 1:2`) the ranks start again, too, when a machine is lost or
joins, which costs none of the restarts.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from types import FrameType
from typing import Any

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
from torchtitan.utils.child_process import LAUNCH_VARIABLE, LOSS_VARIABLE
from torchtitan.utils.local_ranks import FINAL_CODES, LOOPBACK, SHUTDOWN_TIMEOUT_S, StoppedRanks, end_of, pass_on, say

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
        self._stopped = StoppedRanks()
        self._machines: Counter[str] = Counter()
        """The machines that meet, where their number may change"""
        self._failed = False
        """Whether the ranks start again because some have failed, which has cost a restart"""

    @classmethod
    def running(cls) -> tuple[int, ...]:
        """Return the process ids of the ranks when there are some that run."""
        cls.started.wait()
        return cls.ranks

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
            say(f"{os.environ[LOSS_VARIABLE]}: all ranks start again, which costs no restart")
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
        self._stopped.check(Agent.ranks)
        if result.state is WorkerState.FAILED:
            if any(failure.exitcode in FINAL_CODES for failure in result.failures.values()):
                self._remaining_restarts = 0
            rank, first = min(result.failures.items(), key=lambda item: item[1].timestamp)
            self._failed = self._remaining_restarts > 0
            if self._failed:
                os.environ[LOSS_VARIABLE] = f"rank {rank} {end_of(first.exitcode)}"
                say(f"{os.environ[LOSS_VARIABLE]}: all ranks start again ({self._remaining_restarts} restarts left)")
        return result


def main(arguments: list[str]) -> int:
    """Run torchrun with these arguments and return the exit code."""
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_TIMEOUT_S))
    # torchrun counts the ranks of each machine from 0.
    os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${role_name}${rank}]:")
    api.LocalElasticAgent = Agent  # type: ignore[attr-defined]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
        os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGQUIT")
    processes._terminate_process_handler = _stop
    pass_on(Agent.running)
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
        say(str(error))
        return error.exit_code
    except TimeoutError as error:
        say(str(error))
        return EXIT_RETRYABLE
    try:
        with tempfile.TemporaryDirectory(prefix="torchelastic_", ignore_cleanup_errors=True) as folder:
            # The link to the run's folder goes with this one; of a launch that a person has named it stays.
            os.environ.setdefault(LAUNCH_VARIABLE, f"{folder}/run")
            parsed.log_dir = parsed.log_dir or folder
            run(parsed)
    except UserError as error:
        say(str(error))
        return error.exit_code
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        say(f"rank {rank} failed first: it {end_of(failure.exitcode)}")
        # Popen reports death by signal n as -n, shells as 128 + n.
        return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    except SignalException as error:
        say(f"stopped by {error.sigval.name}")
        return 128 + error.sigval
    except (DistError, RendezvousError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        where = parsed.rdzv_endpoint or f"{parsed.master_addr}:{parsed.master_port}"
        say(
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
    if parsed.rdzv_backend != "static":
        machine_name = parsed.local_addr or socket.getfqdn()
        if problem := _lookup_problem(machine_name):
            raise UserError(
                f"this machine's name {machine_name} does not resolve ({problem}), and the ranks would be told to meet "
                "there: give --local-addr with an address of this machine that the others reach, or add the name to "
                "/etc/hosts"
            )
    key = "--rdzv-endpoint" if endpoint else "--master-addr"
    deadline, announced = time.monotonic() + NAME_TIMEOUT_S, False
    while problem := _lookup_problem(host):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{key}: {host} still does not resolve after {NAME_TIMEOUT_S:g} s ({problem})")
        if not announced:
            say(f"{key}: {host} does not resolve on {socket.gethostname()} ({problem}): trying {NAME_TIMEOUT_S:g} s")
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
