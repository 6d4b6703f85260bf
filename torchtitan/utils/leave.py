"""The end of a process that has used torch."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End a process that has done and closed everything, without the interpreter's own teardown.

    A thread of torch that asks for the interpreter's lock during the teardown is ended by force, which can abort a
    rank whose work is done ("terminate called without an active exception").
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
