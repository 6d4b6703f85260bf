"""Where the embedded actors of this process come from: forks of one process that has loaded the engine.

They start in a fraction of a second and share the memory of what is loaded (utils/fork_server.py).
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Mapping

from torchtitan.utils.fork_server import ForkServer

logger = logging.getLogger(__name__)

# All that an actor imports before it answers, but for its `__main__`, which each runs by itself.
MODULES = (
    "torchtitan.inference.engines.embedded.server",
    "torchtitan.inference.serving.command_line",
    "torchtitan.inference.serving.joining",
    "torchtitan.models.hf_checkpoint",
)
_lock = threading.Lock()
_server: ForkServer | None = None
_lost = False
_is_of_run = False


def prepare(environment: Mapping[str, str]) -> None:
    """Start the process from which all embedded actors of a run come, until close(): also those that are started after
    libraries have changed this process's environment (torch sets TORCHINDUCTOR_CACHE_DIR and CUDA_MODULE_LOADING when
    they are first needed)."""
    global _is_of_run
    if starter(environment) is not None:
        with _lock:
            _is_of_run = True


def starter(environment: Mapping[str, str]) -> ForkServer | None:
    """Return the process from which an actor with this environment comes, which is started if there is none yet; None:
    it has ended, and each actor loads the engine by itself."""
    global _server, _lost
    with _lock:
        if _lost:
            return None
        if _server is not None and not _server.alive:
            logger.warning("the fork server has ended: from now on each actor loads the engine by itself")
            _server, _lost = None, True
            return None
        if _server is not None and not _is_of_run and not _server.fits(environment):
            _server.close()
            _server = None
        if _server is None:
            try:
                _server = ForkServer(MODULES, environment)
            except OSError as error:
                logger.warning("no fork server can be started (%s): each actor loads the engine by itself", error)
                _lost = True
        return _server


def close() -> None:
    """End the fork server; its children live on. The next actor starts another one."""
    global _server, _lost, _is_of_run
    with _lock:
        if _server is not None:
            _server.close()
        _server, _lost, _is_of_run = None, False, False


atexit.register(close)
