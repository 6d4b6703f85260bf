"""The pool of processes that run the user's code: a hang, a crash or a memory bomb costs calls, never the run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from torchtitan.config.rollout_tables import Environment, Rewards
from torchtitan.rollout.workers.isolation import find_isolation
from torchtitan.rollout.workers.worker_process import WorkerProcess, WorkerSettings

logger = logging.getLogger(__name__)

# Workers, besides the table's number, that may run at a time for those who need one alone.
ALONE_WORKERS = 4


class WorkerPool:
    """Worker processes with the limits and the isolation of one table. All methods belong to one asyncio loop."""

    def __init__(
        self,
        table: Rewards | Environment,
        what: str,
        module: str,
        setup: dict[str, Any],
        log_file: Path | None = None,
        run_dir: Path | None = None,
        flooded: Callable[[], None] = lambda: None,
        replaced: Callable[[], None] = lambda: None,
    ):
        """what: a worker's name in messages; module: what it runs; setup: its first message, without the limits;
        log_file: for its output, and `flooded` is called once that is cut; run_dir: hidden from isolated workers;
        replaced: called for every worker that is replaced.

        Raises UserError if the sandbox's isolate = true is not possible here.
        """
        sandbox = table.sandbox
        isolation, self._sandbox_description = find_isolation(sandbox.isolate, sandbox.network)
        self._settings = WorkerSettings(
            what, module, {**setup, "memory_mb": sandbox.memory_limit_mb}, log_file, flooded, run_dir,
            sandbox.readable, sandbox.variables, isolation, type(table).__name__.lower(),
        )  # fmt: skip
        self._settings.restricted = sandbox.isolate is not False
        self._misses_isolation = isolation is None and sandbox.isolate == "auto"
        self._count, self._replaced = table.num_workers, replaced
        self._workers: list[WorkerProcess] = []
        self._retired: set[WorkerProcess] = set()
        self._placing = asyncio.Lock()
        self._alone: set[WorkerProcess] = set()
        """Workers with one user each"""
        self._free_alone = asyncio.Semaphore(ALONE_WORKERS)

    async def start(self) -> None:
        """Start all workers. Raises the first one's UserError only once no start is in progress, so that close() may
        then stop them."""
        self._workers = [WorkerProcess(self._settings) for _ in range(self._count)]
        for outcome in await asyncio.gather(*(worker.start() for worker in self._workers), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
        beyond = [self._sandbox_description]
        if self._settings.restricted and (problem := self.about["unrestricted"]):
            beyond.append(f"not restricted: {problem}")
        beyond.append(self._workers[0].bounds)
        logger.info("%s is %s", self._settings.what, "; ".join(beyond))

    @property
    def missing_isolation(self) -> str:
        """Why the workers run other people's code without isolation, although isolate = "auto" asks for it where it
        can be had; empty if they are isolated, or were told not to be."""
        return self._sandbox_description if self._misses_isolation else ""

    @property
    def about(self) -> dict[str, Any]:
        """The workers' reply to the set-up, once they have been started."""
        return self._workers[0].about

    async def close(self) -> None:
        """Stop all workers."""
        await asyncio.gather(*(self._stop(worker) for worker in [*self._workers, *self._retired, *self._alone]))

    async def _stop(self, worker: WorkerProcess) -> None:
        await worker.stop()

    async def take(self) -> WorkerProcess:
        """Return the worker with the fewest users, for one more. Raises UserError if none starts."""
        async with self._placing:
            for place, worker in enumerate(self._workers):
                if worker.broken or not worker.alive:
                    self._retired.add(worker)
                    self._workers[place] = WorkerProcess(self._settings)
                    await self._stop_unused(worker)
                    self._replaced()
                    await self._workers[place].start()
            worker = min(self._workers, key=lambda worker: worker.users)
            worker.users += 1
        return worker

    async def take_alone(self) -> WorkerProcess:
        """Return a new worker that nobody else gets, before or afterwards. Raises UserError if it does not start."""
        await self._free_alone.acquire()
        worker = WorkerProcess(self._settings)
        worker.users = 1
        self._alone.add(worker)
        try:
            await worker.start()
        except BaseException:
            await self.give_back(worker)
            raise
        return worker

    async def give_back(self, worker: WorkerProcess) -> None:
        worker.users -= 1
        if not worker.users:
            worker.end_leftovers()
        await self._stop_unused(worker)
        if worker in self._alone:
            self._alone.discard(worker)
            self._free_alone.release()
            await self._stop(worker)

    @contextlib.asynccontextmanager
    async def worker(self) -> AsyncIterator[WorkerProcess]:
        """Take a worker, and give it back."""
        worker = await self.take()
        try:
            yield worker
        finally:
            await self.give_back(worker)

    async def _stop_unused(self, worker: WorkerProcess) -> None:
        if not worker.users and (worker.broken or worker in self._retired):
            self._retired.discard(worker)
            await worker.stop()
