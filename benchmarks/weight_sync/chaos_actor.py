"""An actor of the scenario `chaos`: the real code, and an engine whose tokens say which version they were drawn from.

The engine generates all the time. A token is drawn from elements of several parameters; each element shows its version,
so that a token of torn or unknown weights cannot pass for another. A line of the log is what was generated under one
tag (epoch, version, digest) since the last line.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.weight_sync.job import TwoSets
from torchtitan.weight_sync.actor.actor import SyncActor
from torchtitan.weight_sync.memory.staging import StagedTensors, StagedVersion

SHAPES = ((512, 640), (1000, 150), (7,), (3, 5, 11), ())
ELEMENTS_PER_TOKEN = 6
LINE_SECONDS = 0.1
STEP_SECONDS = 0.002


def parameter_values(version: int, index: int) -> torch.Tensor:
    """What parameter `index` holds under `version`: exact in float32."""
    shape = SHAPES[index]
    count = torch.Size(shape).numel()
    return ((torch.arange(count) % 61) + 64 * version + 7 * index).float().view(shape)


def element_version(value: float, index: int, position: int) -> float:
    """The version whose parameter `index` holds `value` at `position`; no whole number where none does."""
    return (value - position % 61 - 7 * index) / 64


class Engine:
    """Two sets of weights, exchanged between two decode steps; a version that was not received into the idle one is
    copied into the other."""

    def __init__(self, epoch: str, log: Path):
        self._epoch = epoch
        self.sets = TwoSets({f"p{index}": shape for index, shape in enumerate(SHAPES)}, torch.float32)
        for weight in self.sets.live.values():
            weight.fill_(-1.0)
        self._tag: tuple[str, int, str] | None = None
        self._step = threading.Lock()
        self._random = random.Random(os.getpid())
        self._log = log.open("a", buffering=1)
        self._tokens = self._torn = 0
        self.actor: SyncActor | None = None

    def apply(self, staged: StagedVersion) -> float:
        """Between two steps, by exchange or one parameter after the other."""
        with self._step:
            start = time.monotonic()
            self._write_line()
            if isinstance(staged.tensors, StagedTensors) and staged.tensors.received_in is not None:
                self.sets.apply(staged)
            else:
                for name, weight in self.sets.live.items():
                    weight.copy_(staged.tensors[name])
                    time.sleep(0.0005)  # a step that did not wait would meet two versions here
            self._tag = (staged.epoch, staged.version, staged.digest)
            return time.monotonic() - start

    def generate(self, stop: threading.Event) -> None:
        """Decode steps until `stop`."""
        next_line = time.monotonic() + LINE_SECONDS
        while not stop.wait(STEP_SECONDS):
            with self._step:
                # A poisoned engine must not serve, and one without weights cannot.
                if self._tag is None or self.actor is None or self.actor.puller.poisoned:
                    continue
                self._tokens += 1
                self._torn += any(self._draw() != self._tag[1] for _ in range(ELEMENTS_PER_TOKEN))
                if time.monotonic() >= next_line:
                    self._write_line()
                    next_line = time.monotonic() + LINE_SECONDS

    def _draw(self) -> float:
        index = self._random.randrange(len(SHAPES))
        flat = self.sets.live[f"p{index}"].view(-1)
        position = self._random.randrange(len(flat))
        return element_version(float(flat[position]), index, position)

    def _write_line(self) -> None:
        if self._tokens and self._tag is not None:
            epoch, version, digest = self._tag
            line = {"epoch": epoch, "version": version, "digest": digest, "tokens": self._tokens, "torn": self._torn}
            self._log.write(json.dumps({**line, "pid": os.getpid()}) + "\n")
        self._tokens = self._torn = 0


def main() -> None:
    torch.set_num_threads(1)
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    epoch = arguments["epoch"]
    engine = Engine(epoch, Path(arguments["log"]))
    names = (arguments[name] for name in ("registry", "actor", "epoch", "key"))
    engine.actor = SyncActor(*names, engine.apply, relay_host=arguments["relay_host"], sets=engine.sets)
    engine.actor.start()
    stop = threading.Event()
    threading.Thread(target=engine.generate, args=(stop,), daemon=True).start()
    sys.stdin.read()  # until the benchmark closes it or dies
    stop.set()
    engine.actor.close()


if __name__ == "__main__":
    main()
