"""What vLLM imports in each of its workers (--worker-extension-cls): importing it registers our backend there."""

from __future__ import annotations

import os

from vllm.v1.worker.worker_base import WorkerWrapperBase

from torchtitan.inference.engines.vllm.live_check import look_before_steps
from torchtitan.inference.engines.vllm.serve import SERVER_PID_VARIABLE, register
from torchtitan.utils.child_process import end_with_parent


class WorkerExtension:
    """Becomes a base class of vLLM's worker."""

    def torchtitan_verified_version(self) -> int | None:
        """By /collective_rpc: the last version that this worker has looked at, and found whole; see
        live_check.LiveWeightChecker."""
        return self.weight_transfer_engine.verified_version  # type: ignore[attr-defined]

    def torchtitan_repack(self) -> None:
        """By /collective_rpc, after weights were loaded by vLLM itself; see loading.py."""
        from torchtitan.inference.engines.vllm.loading import repack_what_reloading_leaves

        repack_what_reloading_leaves(self.get_model())  # type: ignore[attr-defined]


def _end_with_server() -> None:
    """vLLM's other processes go on for ever where its server was killed; without a worker they end."""
    server = int(os.environ.get(SERVER_PID_VARIABLE, 0))
    if server not in (0, os.getpid()):
        end_with_parent(server)


register()
look_before_steps(
    WorkerWrapperBase, lambda wrapper: getattr(getattr(wrapper.worker, "weight_transfer_engine", None), "checker", None)
)
_end_with_server()
