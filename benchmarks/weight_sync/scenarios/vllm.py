"""One version into a real vLLM server that generates: our backend against vLLM's own trainer API.

As large as Qwen3-0.6B: --layers 28 --vocabulary 151936.

Two vLLM servers (CPU build) with the same random Qwen3 in bfloat16, in turns; four requests generate all the time.

    ours     a trainer publishes a version (commit); our backend pulls and verifies it into staging memory while the
             server generates, then loads it. From the commit until the registry knows that it is served.
    theirs   pause (requests kept), WeightTransferTrainerFactory's trainer with a ModuleSource sends whole tensors in
             order, the worker loads them as they come; prefix cache reset, resume. vLLM ships no engine for CPUs: the
             smallest one with gloo is registered on both sides (benchmarks/peers/vllm_gloo.py).

Servers have a core of their own; trainers, shard servers and clients share another.

    pause_ratio       longest time in which no token came, ours ÷ theirs
    total_ratio       time of the whole, ours ÷ theirs
    tp2_bytes_share   bytes received by one of two tensor-parallel workers ÷ a whole version

Medians over turns of both.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from benchmarks import common
from benchmarks.weight_sync.harness import Option, Run
from benchmarks.weight_sync.job import Job
from benchmarks.weight_sync.small_models import VOCABULARY, make_qwen3
from benchmarks.weight_sync.vllm_server import TOKEN_ENV, Process, Streams, VLLMActor, pin_tree, vllm_python
from tests.journals import deliveries_of
from torchtitan.config.job_config import WeightSync as WeightSyncConfig
from torchtitan.distributed.placement import unique_parameters

BARS = {"pause_ratio": ("<=", 0.4), "total_ratio": ("<=", 0.9), "tp2_bytes_share": ("<=", 0.6)}
OPTIONS = {
    "turns": Option(7, quick=1),
    "layers": Option(12, quick=2),
    "hidden": Option(1024, "with 12 layers: 206 million parameters", quick=128),
    "vocabulary": Option(VOCABULARY),
    "transport": Option("tcp", "how our versions travel", choices=("tcp", "ipc")),
}
STREAMS = 4
TOKENS_BEFORE, TOKENS_AFTER = 60, 40
SERVER_OPTIONS = {"max-length": "1024", "max-sequences": "16", "memory-gb": "0.5"}


class Ours:
    """A trainer in this process, and a server with our backend."""

    def __init__(self, model: Path, folder: Path, closing: contextlib.ExitStack, transport: str, workers: int = 1):
        import transformers

        options = [word for name, value in SERVER_OPTIONS.items() for word in (f"--{name}", value)]
        options += ["--tensor-parallel-size", str(workers)]
        self._folder = folder
        self.actor = VLLMActor(folder, "ours", model, "bfloat16", options)
        closing.callback(self.actor.close)
        policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        self._parameters = unique_parameters(dict(policy.named_parameters()))
        self._job = Job(self._parameters, folder, WeightSyncConfig(transport=transport), dtype="bfloat16")
        closing.callback(self._job.close)
        self.token = self.actor.token
        self.parts: dict[str, list[float]] = {"transfer_s": [], "apply_s": [], "pause_s": []}

    def join(self) -> str:
        """URL of the engine, once it serves a first version."""
        self.actor.join(self._job.place)
        self._publish()
        return self.actor.engine_url

    def update(self) -> tuple[float, float]:
        """When it began and end (time.time())."""
        start, end = self._publish()
        figures = self._job.sync.statistics()
        for name, values in self.parts.items():
            values.append(figures[f"weight_sync/ours/{name}"])
        return start, end

    def worker_share(self) -> float:
        """Of a whole version: what the worker with the most has received of the last one."""
        applied = deliveries_of(self._folder, "applied")
        whole = sum(2 * parameter.numel() for parameter in self._parameters.values())
        return float(applied[-1]["figures"]["worker_bytes"]) / whole

    def _publish(self) -> tuple[float, float]:
        self._job.publish_when_free(self._change)
        self._job.applied_everywhere(1)
        return self._changed, time.time()

    @torch.no_grad()
    def _change(self) -> None:
        for parameter in self._parameters.values():
            parameter.neg_()
        self._changed = time.time()


class Theirs:
    """A stock server with the smallest gloo engine, and vLLM's trainer in a process of its own."""

    def __init__(self, model: Path, folder: Path, closing: contextlib.ExitStack):
        python = vllm_python()
        self._model, self._python, self._closing, self._folder = model, python, closing, folder
        self.server = Process(
            [
                python, "-m", "torchtitan.inference.engines.vllm.serve", "--token-env", TOKEN_ENV, "--",
                "--model", str(model), "--dtype", "bfloat16", "--enforce-eager",
                "--max-model-len", SERVER_OPTIONS["max-length"], "--max-num-seqs", SERVER_OPTIONS["max-sequences"],
                "--kv-cache-memory-bytes", str(int(float(SERVER_OPTIONS["memory-gb"]) * 2**30)),
                "--no-enable-chunked-prefill", "--disable-uvicorn-access-log", "--skip-tokenizer-init",
                "--worker-extension-cls", "benchmarks.peers.vllm_gloo.WorkerExtension",
                "--weight-transfer-config", json.dumps({"backend": "plain_gloo"}),
            ],
            folder, "theirs",
        )  # fmt: skip
        closing.callback(self.server.close)
        self.token = self.server.token

    def join(self) -> str:
        """URL of the server, once it got a first version."""
        url = self.server.wait()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        script = common.REPOSITORY / "benchmarks" / "peers" / "vllm_gloo.py"
        log = self._closing.enter_context((self._folder / "their_trainer.log").open("wb"))
        self._trainer = subprocess.Popen(
            [self._python, str(script), url, str(self._model), str(port)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env={**os.environ, "PYTHONPATH": str(common.REPOSITORY), TOKEN_ENV: self.token},
        )  # fmt: skip
        self._closing.callback(self._trainer.kill)
        self._answer()
        self.update()
        return url

    def update(self) -> tuple[float, float]:
        """When it began and end (time.time())."""
        assert self._trainer.stdin is not None
        self._trainer.stdin.write("\n")
        self._trainer.stdin.flush()
        start, end = json.loads(self._answer())
        return start, end

    def _answer(self) -> str:
        assert self._trainer.stdout is not None
        for line in self._trainer.stdout:
            if line.startswith("SENT "):
                return line.removeprefix("SENT ")
        raise SystemExit(f"their trainer ended: {(self._folder / 'their_trainer.log').read_text()[-2000:]}")


class Turns:
    """Measurements of one way."""

    def __init__(self, url: str, token: str, update: Callable[[], tuple[float, float]]):
        self._url, self._token, self._update = url, token, update
        self.pause: list[float] = []
        self.total: list[float] = []
        self.between_tokens: list[float] = []

    def turn(self) -> None:
        streams = Streams(self._url, self._token, STREAMS)
        try:
            streams.wait_for_tokens(TOKENS_BEFORE)
            before = list(streams.arrivals)[-TOKENS_BEFORE // 2 :]
            start, end = self._update()
            streams.wait_for_tokens(TOKENS_AFTER)
            self.pause.append(streams.longest_gap(start, end))
            self.total.append(end - start)
            self.between_tokens.append((before[-1] - before[0]) / len(before) * STREAMS)
        finally:
            streams.close()


def take_turns(ways: dict[str, Turns], turns: int) -> None:
    """Each way once per turn; the first turn warms up."""
    for turn in range(-1, turns):
        for name in list(ways)[:: 1 if turn % 2 == 0 else -1]:
            ways[name].turn()
        if turn < 0:
            for way in ways.values():
                way.pause.clear()
                way.total.clear()
            continue
        parts = [f"{name}: {1e3 * way.pause[-1]:.0f} ms of {1e3 * way.total[-1]:.0f} ms" for name, way in ways.items()]
        common.progress(f"turn {turn}: no token for {'  '.join(parts)}")


def two_workers_share(run: Run) -> float:
    """tp2_bytes_share."""
    folder = run.folder / "two_workers"
    with contextlib.ExitStack() as closing:
        make_qwen3(folder / "model", run.options.layers, run.options.hidden, run.options.vocabulary)
        two = Ours(folder / "model", folder, closing, run.options.transport, workers=2)
        two.join()
        return two.worker_share()


def measure(run: Run) -> dict[str, float]:
    options, folder = run.options, run.folder
    model = folder / "model"
    elements = make_qwen3(model, options.layers, options.hidden, options.vocabulary)
    with contextlib.ExitStack() as closing:
        ours = Ours(model, folder, closing, options.transport)
        reference = Theirs(model, folder, closing)
        ways = {
            "ours": Turns(ours.join(), ours.token, ours.update),
            "theirs": Turns(reference.join(), reference.token, reference.update),
        }
        trainer_core, server_core = common.two_cores()
        # Trainers, shard servers and clients here, the servers there, as if these were two machines.
        pin_tree(psutil.Process(), trainer_core)
        ours.actor.pin(server_core)
        reference.server.pin(server_core)
        take_turns(ways, options.turns)
    # A server of two workers takes a minute to start; the tests have one of their own.
    shares = {} if run.quick else {"tp2_bytes_share": two_workers_share(run)}
    run.conditions |= {
        "parameters": elements,
        "bytes_per_version": 2 * elements,
        "streams": STREAMS,
        "trainer_core": trainer_core,
        "server_core": server_core,
    }
    return {
        "pause_ratio": common.median_ratio(ways["ours"].pause, ways["theirs"].pause),
        "total_ratio": common.median_ratio(ways["ours"].total, ways["theirs"].total),
        **shares,
        **{f"pause_ms_{name}": 1e3 * statistics.median(way.pause) for name, way in ways.items()},
        **{f"total_ms_{name}": 1e3 * statistics.median(way.total) for name, way in ways.items()},
        **{f"{name}_ours": statistics.median(values) for name, values in ours.parts.items()},
        "token_ms": 1e3 * statistics.median(ways["ours"].between_tokens),
    }
