"""The training loop.

    torchrun --nproc_per_node=2 -m torchtitan.grpo_train --job.config_file train_configs/debug_cpu.toml

Reads like the picture of a step in docs/how_a_step_flows.md: an order arrives (normally a batch), the policy trains on
it, the new version is offered to the actors, and the next order is asked for. Every rank runs this same loop.
"""

from __future__ import annotations

import logging
import sys
import time

from torchtitan.config.job_config import JobConfig
from torchtitan.config.manager import parse_command_line
from torchtitan.errors import UserError

logger = logging.getLogger(__name__)


def train(config: JobConfig) -> None:
    """Run the job until its last step, a stop signal or a UserError."""
    from torchtitan.components.job import Job
    from torchtitan.components.orders import Kind

    with Job(config) as job:
        job.start()
        boundary = time.perf_counter()
        data_wait = 0.0
        while True:
            waiting = time.perf_counter()
            order = job.next_order()
            data_wait += time.perf_counter() - waiting
            if order.kind is Kind.STOP:
                break
            if order.kind is Kind.SNAPSHOT:
                job.weights.snapshot_owed(job.version)
            elif order.kind is Kind.EXPORT:
                job.export()
            elif order.kind is Kind.BATCH and order.batch is not None:
                result = job.trainer.train_batch(order.batch, job.weights.reserve)
                job.version += 1
                job.publish(result)
                job.save_if_due()
                now = time.perf_counter()
                times = {"time/step_s": now - boundary, "time/data_wait_s": data_wait}
                boundary, data_wait = now, 0.0
                job.log_step(order.batch, result, times)
                job.evaluate_if_due()
        job.finish()


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code. Mistakes of the user's are printed without a traceback."""
    try:
        config, dry_run = parse_command_line(sys.argv[1:] if argv is None else argv)
        if dry_run:
            from torchtitan.config.plan import describe_plan, world_size

            print(describe_plan(config, world_size()))
            return 0
        train(config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
