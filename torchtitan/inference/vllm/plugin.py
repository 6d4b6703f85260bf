"""Makes our weight-transfer backend known to vLLM; runs inside its processes.

Also the entry point `vllm.general_plugins`, for environments of vLLM in which this package is installed.
"""

from __future__ import annotations

import contextlib

BACKEND = "torchtitan"
SERVER_PID_VARIABLE = "TORCHTITAN_ENGINE_SERVER_PID"


def register() -> None:
    """Add the backend to vLLM's factory. May be called several times in a process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # A ValueError says that it is there already.
    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine(BACKEND, "torchtitan.inference.vllm.backend", "ReceivingBackend")
