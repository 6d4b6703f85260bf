"""torchrun, with the exit code of the rank that failed first and without its own tracebacks.

    python -m torchtitan.utils.launch <torchrun's arguments>

torchrun answers every failure of a rank with exit code 1, and every signal with a traceback. Here a failed rank's own
exit code is carried through, and a signal ends in 128 + its number once the ranks have gone. Its folder among the
temporary files goes with it, unless `--log-dir` names another.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

# Ranks leave within checkpoint.save_deadline_s (at most 600) by themselves; torchrun's SIGKILL is only the backstop.
SHUTDOWN_TIMEOUT_S = 630


def main(arguments: list[str]) -> int:
    """Run torchrun with these arguments and return the exit code."""
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_TIMEOUT_S))
    parsed = parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="torchelastic_", ignore_cleanup_errors=True) as folder:
            parsed.log_dir = parsed.log_dir or folder
            run(parsed)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        # Popen reports death by signal n as -n, shells as 128 + n.
        code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        how = "" if failure.exitcode >= 0 else f" ({signal.Signals(-failure.exitcode).name})"
        print(f"[launch] rank {rank} failed first, with exit code {failure.exitcode}{how}", file=sys.stderr)
        return code
    except SignalException as error:
        print(f"[launch] stopped by {error.sigval.name}", file=sys.stderr)
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
