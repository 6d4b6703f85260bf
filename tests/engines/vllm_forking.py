"""A plugin of vLLM for tests: its processes are forks, as they are on GPUs.

On CPUs each would import all of vLLM again, which takes longer than the rest of its start. (Where something has
computed on several threads before, a fork may hang: tests have one thread.)
"""

from __future__ import annotations

import multiprocessing
import sys

GROUP, FUNCTION = "vllm.general_plugins", "tests.engines.vllm_forking:plug_in"


def plug_in() -> None:
    """Called in each of vLLM's processes, before it starts others."""
    # Where it is defined, and where it may have been imported to by now.
    for name in ("vllm.utils.system_utils", "vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor"):
        if name in sys.modules:
            sys.modules[name].get_mp_context = lambda: multiprocessing.get_context("fork")  # type: ignore[attr-defined]
