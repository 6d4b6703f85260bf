"""Real engines that do not hold what the trainer sent: who notices, and does an honest version ever look like that?

A small random Qwen3 in bfloat16 with a tied head. After a few honest versions the engine's next load is spoiled from
within (saboteur.py), once for each of these, and after each the actor has to be whole again with the next version:

    flip, flip_low  one element of a live weight has another bit: the highest, or the lowest of its exponent
    one_of_two      one of two tensor-parallel workers keeps the weights that it had
    stale           all of them do, under the new version's label
    missing         one parameter is not loaded
    tied_head       a head that is computed with in a packed copy is not packed anew
    swap            two layers' matrices of one shape have changed places
    torn            half of a matrix is another version's, as if memory had been written while it was read
    base            adapters are merged into other weights than they were trained on

Noticed is what a run acts on: the load is refused, the actor is poisoned (weight_sync.verify = digest looks at the live
weights), or its log-probs of the probe differ by more than weight_sync.probe_tolerance, twice in a row. Then honest
versions, each looked at in the same way.

    missed         sabotages that nothing noticed; of sglang the probe sees what moves log-probs
    false_alarms   honest versions that looked wrong
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import common
from benchmarks.weight_sync import saboteur
from benchmarks.weight_sync.harness import Option, Run
from tests.engines import adapter_trainer, job
from tests.engines.models import VOCABULARY, make_model
from tests.journals import deliveries_of, journal_of
from tests.processes import Processes
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.actor_client import TOKEN_VARIABLE
from torchtitan.inference.engines.sidecar.foreign_engine import AdminClient
from torchtitan.inference.engines.sidecar.sidecar_process import find_python
from torchtitan.inference.pool.weight_probe import mean_difference, probe_tolerance
from torchtitan.trainer.mismatch import probe_tokens

BARS = {"missed": ("<=", 0), "false_alarms": ("<=", 0)}
WHOLE = ("flip", "flip_low", "stale", "missing", "swap", "torn")
KINDS = {"embedded": WHOLE, "vllm": (*WHOLE, "one_of_two", "tied_head"), "sglang": (*WHOLE, "one_of_two")}
OPTIONS = {
    "backend": Option("embedded", "the engine", choices=tuple(KINDS)),
    "versions": Option(1000, "honest ones", quick=20),
}
SECONDS = 90.0
JOURNAL_SECONDS = 0.2
LOOKS = 2


class Embedded(job.Actor):
    """The embedded engine: server and engine in one process."""

    def __init__(self, processes: Processes, model: Path):
        command = [
            sys.executable,
            "-m",
            "benchmarks.weight_sync.saboteur",
            "--model",
            str(model),
            "--dtype",
            "bfloat16",
        ]
        command += ["--threads", "1", "--token-env", TOKEN_VARIABLE]
        port = processes.start_server("embedded", command, SECONDS, **{TOKEN_VARIABLE: job.TOKEN})
        self.processes, self.kind, self.name, self.url = processes, "embedded", "embedded", f"http://127.0.0.1:{port}"
        self.agent = AdminClient(self.url, job.TOKEN)


class Watch:
    """Looks at an actor as a run does."""

    def __init__(self, actor: job.Actor, trainer: job.Trainer, model: Path, digest: bool):
        self._actor, self._trainer, self._digest = actor, trainer, digest
        config = JobConfig()
        config.inference.dtype, config.weight_sync.verify, config.model.hf_assets_path = "bfloat16", "probe", str(model)
        self._tolerance = probe_tolerance(config)
        self._tokens = probe_tokens(config, VOCABULARY)
        self.difference = 0.0

    def noticed(self) -> str:
        """What finds that the actor does not hold the trainer's newest version; nothing where it does. Raises
        AssertionError where neither is known in time."""
        start, version, trainer = time.time(), self._trainer.version, self._trainer
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            if found := self._journaled(version, start):
                return found
            known = trainer.sync.actors().get("actor-0")
            if known is not None and known.serves and known.version == version:
                if not self._digest:
                    return self._probe()
                if self._whole() == {str(version)}:
                    # It may have refused the version first, and the journal's lines take a moment.
                    time.sleep(JOURNAL_SECONDS)
                    return self._journaled(version, start)
            time.sleep(0.02)
        raise AssertionError(f"version {version} was neither served nor refused:\n{trainer.journal_tail()}")

    def _journaled(self, version: int, start: float) -> str:
        folder = self._trainer.folder
        for kind, lines in (
            ("poisoned", journal_of(folder, "poisoned")),
            ("refused", deliveries_of(folder, "refused")),
        ):
            for line in lines:
                if line["time"] > start - SECONDS and line["version"] == version:
                    return f"{kind}: {line['reason'][:200]}"
        return ""

    def _whole(self) -> set[str]:
        """The versions that were last found whole, by all that hold weights."""
        if self._actor.kind == "embedded":
            return {str(self._actor.health()["verified"]["version"])}
        self._actor.score(self._tokens)  # vLLM looks when it works
        order = {"method": "torchtitan_verified_version", "kwargs": {}, "timeout": SECONDS}
        return set(map(str, self._actor.engine.call("POST", "/collective_rpc", SECONDS, order)["results"]))

    def _probe(self) -> str:
        expected = self._trainer.log_probs(self._tokens)
        for _ in range(LOOKS):
            self.difference, _place = mean_difference(expected, self._actor.score(self._tokens))
            if self.difference <= self._tolerance:
                return ""
        return f"probe: {self.difference:.3g} nats apart"


@contextlib.contextmanager
def started(backend: str, model: Path, processes: Processes) -> Iterator[job.Actor]:
    """The engine, with two workers where it has workers. Ends the benchmark where the engine is not installed."""
    if backend == "embedded":
        yield Embedded(processes, model)
        return
    try:
        python = Path(find_python(backend, ""))
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    options = ["--tensor-parallel-size", "2", "--dtype", "bfloat16"]
    plugins = processes.folder / "plugins"
    saboteur.install_into_sglang(plugins)
    if backend == "vllm":
        extension = "benchmarks.weight_sync.saboteur_vllm.WorkerExtension"
        options += ["--verify-every", "1", "--", "--worker-extension-cls", extension]
    environment = {"PYTHONPATH": f"{common.REPOSITORY}:{plugins}"}
    yield job.start_actor(processes, backend, python, model, *options, **environment)


def spoil_next(file: Path, kind: str) -> None:
    """Of both workers, where there are two."""
    for rank in range(2):
        Path(f"{file}.{rank}").write_text(kind)


def leave_alone(file: Path) -> None:
    for rank in range(2):
        Path(f"{file}.{rank}").unlink(missing_ok=True)


def play(actor: job.Actor, trainer: job.Trainer, watch: Watch, kinds: tuple[str, ...], file: Path) -> dict[str, str]:
    """Each sabotage once: who has noticed."""
    found = {}
    for _ in range(2):
        trainer.bring()
        assert not (why := watch.noticed()), why
    for kind in kinds:
        spoil_next(file, kind)
        trainer.publish()
        found[kind] = watch.noticed() or f"NOTHING ({watch.difference:.2g} nats apart)"
        common.progress(f"{kind:10} {found[kind]}")
        leave_alone(file)
        trainer.bring()
        assert not (why := watch.noticed()), f"not whole again after {kind}: {why}"
    return found


def measure(run: Run) -> dict[str, float]:
    folder, backend, alarms, largest = run.folder, run.options.backend, 0, 0.0
    processes = run.closing.enter_context(Processes(folder))
    file = folder / "sabotage"
    os.environ[saboteur.VARIABLE], os.environ[TOKEN_VARIABLE] = str(file), job.TOKEN
    model, other = (make_model(folder / f"model{seed}", seed=100 + seed, dtype="bfloat16") for seed in range(2))
    with started(backend, model, processes) as actor:
        with job.training(folder / "whole", model, dtype="bfloat16") as trainer:
            actor.connect(trainer)
            watch = Watch(actor, trainer, model, backend != "sglang")
            found = play(actor, trainer, watch, KINDS[backend], file)
            watch.difference = 0.0
            for number in range(run.options.versions):
                trainer.bring()
                alarms += bool(watch.noticed())
                largest = max(largest, watch.difference)
                if number % 100 == 99:
                    common.progress(f"{number + 1} honest versions, {alarms} alarms, probe at most {largest:.3g}")
        if backend == "embedded":
            # It merges into what it has loaded, which has been replaced.
            processes.stop("embedded")
            actor = Embedded(processes, model)
        with adapter_trainer.training(folder / "adapters", other, dtype="bfloat16") as adapters:
            actor.connect(adapters)
            watch = Watch(actor, adapters, model, digest=False)
            adapters.publish()
            found["base"] = watch.noticed() or "NOTHING"
            common.progress(f"base       {found['base']}")
    run.conditions |= {"noticed_by": found, "honest_probe_at_most": largest}
    missed = [kind for kind, noticed_by in found.items() if noticed_by.startswith("NOTHING")]
    return {"missed": len(missed), "false_alarms": alarms}
