"""torchrun, with the exit code of the rank that failed first and without its own tracebacks.

    python -m torchtitan.utils.launch <torchrun's arguments>

torchrun answers every failure of a rank with exit code 1, and every signal with a traceback. Here a failed rank's own
exit code is carried through, and a signal ends in 128 + its number once the ranks have gone. Its folder among the
temporary files goes with it, unless `--log-dir` names another.

With `--max-restarts N` all ranks are started again up to N times after one was killed or broke off. The run knows by
LAUNCH_VARIABLE that it has been started before, and goes on where it was (trainer/run_dir.py).
"""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__":
    # Ctrl-C while the rest is imported, or before there is a run that answers it.
    signal.signal(signal.SIGINT, lambda *_: sys.exit(128 + signal.SIGINT))

from torchtitan.errors import another_package

if said := another_package():
    sys.exit(said)

import os
import tempfile

from torch.distributed import DistError
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api
from torch.distributed.run import parse_args, run

from torchtitan.errors import BROKEN_OFF
from torchtitan.utils.child_process import LAUNCH_VARIABLE, LOSS_VARIABLE

# Ranks leave within checkpoint.save_deadline_s (at most 600) by themselves; torchrun's SIGKILL is only the backstop.
SHUTDOWN_TIMEOUT_S = 630
# What a rank ends with that has said what a person has to change: it would only say so again.
FINAL_CODES = (1, 2)


class Agent(local_elastic_agent.LocalElasticAgent):
    """torchrun's own, which restarts only where another try may help, and tells the ranks why."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED:
            if any(failure.exitcode in FINAL_CODES for failure in result.failures.values()):
                self._remaining_restarts = 0
            rank, first = min(result.failures.items(), key=lambda item: item[1].timestamp)
            if self._remaining_restarts > 0:
                os.environ[LOSS_VARIABLE] = f"rank {rank} {_end_of(first.exitcode)}"
                _say(f"{os.environ[LOSS_VARIABLE]}: all ranks start again ({self._remaining_restarts} restarts left)")
        return result


def main(arguments: list[str]) -> int:
    """Run torchrun with these arguments and return the exit code."""
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_TIMEOUT_S))
    api.LocalElasticAgent = Agent  # type: ignore[attr-defined]
    parsed = parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="torchelastic_", ignore_cleanup_errors=True) as folder:
            # The link to the run's folder goes with this one; of a launch that a person has named it stays.
            os.environ.setdefault(LAUNCH_VARIABLE, f"{folder}/run")
            parsed.log_dir = parsed.log_dir or folder
            run(parsed)
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
        return BROKEN_OFF
    return 0


def _end_of(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def _say(text: str) -> None:
    print(f"[launch] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
