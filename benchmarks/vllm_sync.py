"""One version into a real vLLM server that generates: our backend against vLLM's own trainer API.

    python benchmarks/vllm_sync.py --json
    python benchmarks/vllm_sync.py --layers 28 --vocabulary 151936 --json     (as large as Qwen3-0.6B)
    python benchmarks/vllm_sync.py --transport ipc --json                     (ours by memory of the same machine)

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

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

import psutil  # noqa: E402
import torch  # noqa: E402

from benchmarks import common  # noqa: E402
from benchmarks.small_trainer import Job  # noqa: E402
from benchmarks.vllm_actor import (  # noqa: E402
    TOKEN_ENV,
    VOCABULARY,
    Process,
    Streams,
    VLLMActor,
    make_model,
    pin_tree,
    vllm_python,
)
from torchtitan.config.job_config import WeightSync as WeightSyncConfig  # noqa: E402
from torchtitan.distributed.placement import unique_parameters  # noqa: E402

BARS = {"pause_ratio": ("<=", 0.4), "total_ratio": ("<=", 0.9), "tp2_bytes_share": ("<=", 0.6)}
STREAMS = 4
TURN_SECONDS = 120.0
TOKENS_BEFORE, TOKENS_AFTER = 60, 40
SERVER_OPTIONS = {"max-length": "1024", "max-sequences": "16", "memory-gb": "0.5"}


class Ours:
    """A trainer in this process, and a server with our backend."""

    def __init__(self, model: Path, folder: Path, stack: contextlib.ExitStack, transport: str, workers: int = 1):
        import transformers

        options = [word for name, value in SERVER_OPTIONS.items() for word in (f"--{name}", value)]
        options += ["--tensor-parallel-size", str(workers)]
        self._folder = folder
        self.actor = VLLMActor(folder, "ours", model, "bfloat16", options)
        stack.callback(self.actor.close)
        policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        self._parameters = unique_parameters(dict(policy.named_parameters()))
        self._job = Job(self._parameters, folder, WeightSyncConfig(transport=transport), dtype="bfloat16")
        stack.callback(self._job.sync.close)
        self.token = self.actor.token
        self.parts: dict[str, list[float]] = {"transfer_s": [], "apply_s": [], "pause_s": []}

    def join(self) -> str:
        """URL of the engine, once it serves a first version."""
        sync = self._job.sync
        self.actor.join(sync.registry_address, self._job.epoch, self._job.token)
        self._publish()
        return self.actor.engine_url

    def update(self) -> tuple[float, float]:
        """When it began and ended (time.time())."""
        begun, ended = self._publish()
        figures = self._job.sync.statistics()
        for name, values in self.parts.items():
            values.append(figures[f"weight_sync/ours/{name}"])
        return begun, ended

    def worker_share(self) -> float:
        """Of a whole version: what the worker with the most has received of the last one."""
        lines = (self._folder / "weight_sync" / "registry.jsonl").read_text().splitlines()
        applied = [one for one in map(json.loads, lines) if one["event"] == "applied"]
        whole = sum(2 * parameter.numel() for parameter in self._parameters.values())
        return float(applied[-1]["figures"]["worker_bytes"]) / whole

    def _publish(self) -> tuple[float, float]:
        sync = self._job.sync
        common.wait_for(sync.reserve, TURN_SECONDS, "a free slot")
        no_vote = not sync.reserve()
        sync.fence()
        with torch.no_grad():
            for parameter in self._parameters.values():
                parameter.neg_()
        begun = time.time()
        self._job.publish(no_vote)
        self._job.applied_everywhere(1, TURN_SECONDS)
        return begun, time.time()


class Theirs:
    """A stock server with the smallest gloo engine, and vLLM's trainer in a process of its own."""

    def __init__(self, model: Path, folder: Path, stack: contextlib.ExitStack):
        python = vllm_python()
        self._model, self._python, self._stack, self._folder = model, python, stack, folder
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
        stack.callback(self.server.close)
        self.token = self.server.token

    def join(self) -> str:
        """URL of the server, once it got a first version."""
        url = self.server.wait()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        script = REPOSITORY / "benchmarks" / "peers" / "vllm_gloo.py"
        log = self._stack.enter_context((self._folder / "their_trainer.log").open("wb"))
        self._trainer = subprocess.Popen(
            [self._python, str(script), url, str(self._model), str(port)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), TOKEN_ENV: self.token},
        )  # fmt: skip
        self._stack.callback(self._trainer.kill)
        self._answer()
        self.update()
        return url

    def update(self) -> tuple[float, float]:
        """When it began and ended (time.time())."""
        assert self._trainer.stdin is not None
        self._trainer.stdin.write("\n")
        self._trainer.stdin.flush()
        begun, ended = json.loads(self._answer())
        return begun, ended

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
            begun, ended = self._update()
            streams.wait_for_tokens(TOKENS_AFTER)
            self.pause.append(streams.longest_gap(begun, ended))
            self.total.append(ended - begun)
            self.between_tokens.append((before[-1] - before[0]) / len(before) * STREAMS)
        finally:
            streams.close()


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024, help="with 12 layers: 206 million parameters")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--transport", choices=["tcp", "ipc"], default="tcp", help="how our versions travel")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.turns, arguments.layers, arguments.hidden = 1, 2, 128
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        elements = make_model(folder / "model", arguments.layers, arguments.hidden, arguments.vocabulary)
        ours = Ours(folder / "model", folder, stack, arguments.transport)
        theirs = Theirs(folder / "model", folder, stack)
        ways = {
            "ours": Turns(ours.join(), ours.token, ours.update),
            "theirs": Turns(theirs.join(), theirs.token, theirs.update),
        }
        trainer_core, server_core = common.two_cores()
        # Trainers, shard servers and clients here, the servers there, as if these were two machines.
        pin_tree(psutil.Process(), trainer_core)
        ours.actor.pin(server_core)
        theirs.server.pin(server_core)
        for turn in range(-1, arguments.turns):
            for name in list(ways)[:: 1 if turn % 2 == 0 else -1]:
                ways[name].turn()
            if turn < 0:
                for way in ways.values():
                    way.pause.clear()
                    way.total.clear()
            else:
                parts = "  ".join(
                    f"{name}: {1e3 * way.pause[-1]:.0f} ms of {1e3 * way.total[-1]:.0f} ms"
                    for name, way in ways.items()
                )
                common.progress(f"turn {turn}: no token for {parts}")
    shares = {}
    if not arguments.quick:  # a server of two workers takes a minute to start; the tests have one of their own
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            make_model(folder / "model", arguments.layers, arguments.hidden, arguments.vocabulary)
            two = Ours(folder / "model", folder, stack, arguments.transport, workers=2)
            two.join()
            shares["tp2_bytes_share"] = two.worker_share()
    medians = {name: [statistics.median(values) for values in (way.pause, way.total)] for name, way in ways.items()}
    figures = {
        "pause_ratio": common.median_ratio(ways["ours"].pause, ways["theirs"].pause),
        "total_ratio": common.median_ratio(ways["ours"].total, ways["theirs"].total),
        **shares,
        **{f"pause_ms_{name}": 1e3 * pause for name, (pause, _) in medians.items()},
        **{f"total_ms_{name}": 1e3 * total for name, (_, total) in medians.items()},
        **{f"{name}_ours": statistics.median(values) for name, values in ours.parts.items()},
        "token_ms": 1e3 * statistics.median(ways["ours"].between_tokens),
    }
    conditions = {
        **{name: value for name, value in vars(arguments).items() if name != "json"},
        "parameters": elements,
        "bytes_per_version": 2 * elements,
        "streams": STREAMS,
        "trainer_core": trainer_core,
        "server_core": server_core,
        "torch": torch.__version__,
    }
    common.report("vllm_sync", figures, BARS, conditions, arguments.json)


if __name__ == "__main__":
    main()
