"""A process that ends with the one that it works for. Standard library only: engines' own environments use it too."""

from __future__ import annotations

import os
import signal
import threading
import time

PARENT_CHECK_SECONDS = 1.0
# After SIGTERM the process ends by itself within this time, or is ended.
EXIT_SECONDS = 5.0


def end_with_parent(parent: int, whole_group: bool = False) -> None:
    """Watch a process from a thread; SIGTERM ourselves when it is gone, and end anyhow if that does not do.

    whole_group: this process leads a group of its own, all of which is killed then.
    """
    is_our_parent = os.getppid() == parent

    def alive() -> bool:
        if is_our_parent:
            # Unlike the number, parenthood cannot be taken over by a new process.
            return os.getppid() == parent
        try:
            os.kill(parent, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def watch() -> None:
        while alive():
            time.sleep(PARENT_CHECK_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(EXIT_SECONDS)
        if whole_group and os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
