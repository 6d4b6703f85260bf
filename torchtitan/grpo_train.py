"""The training loop.

    torchrun --nproc_per_node=2 -m torchtitan.grpo_train --job.config_file train_configs/debug_cpu.toml

Reads like the picture of a step in docs/how_a_step_flows.md: a command arrives (normally a batch), the policy trains on
it, the new version is offered to the actors, and the next command is asked for. Every rank runs this same loop.
"""

from __future__ import annotations

import sys

from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.preflight.loading import parse_command_line
from torchtitan.utils.leave import leave


def train(config: JobConfig) -> int:
    """Run the job until its last step or a stop signal; returns the exit code. Mistakes come up as UserError."""
    from torchtitan.trainer.commands import Kind
    from torchtitan.trainer.job import Job

    with Job(config) as job:
        job.start()
        while (command := job.next_command()).kind is not Kind.STOP:
            if command.kind is Kind.SNAPSHOT:
                job.publish_pending()
            elif command.generation is not None:
                job.generate(command.generation)
            elif command.kind is Kind.EXPORT:
                job.export_on_demand()
            elif command.batch is not None:
                result = job.trainer.train_batch(command.batch, job.sync)
                job.version += 1
                job.publish(result)
                job.log_step(command.batch, result)
                job.save_if_due()
        job.finish()
        return job.exit_code


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code. Mistakes of the user's are printed without a traceback."""
    try:
        config, dry_run = parse_command_line(sys.argv[1:] if argv is None else argv)
        if dry_run:
            from torchtitan.config.derived import world_size
            from torchtitan.preflight.plan import describe_plan

            print(describe_plan(config, world_size()))
            return 0
        return train(config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    leave(main())
