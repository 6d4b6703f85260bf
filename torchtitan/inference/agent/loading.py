"""How a staged, verified version gets from the agent into the engine: the ways, and the one by files."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchtitan.inference.base_weights import outlines
from torchtitan.weight_sync.staging import StagedVersion, WeightsRefused

if TYPE_CHECKING:
    from torchtitan.inference.agent.engine import EngineOptions
    from torchtitan.weight_sync.actor import Actor

MEMORY = Path("/dev/shm")
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
# In each agent's folder: the process and the machine that it belongs to.
OWNER = "owner"
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json", ".bin.index.json")


class WeightLoader:
    """One way into one engine. All methods are called from the agent's threads and have deadlines of their own."""

    workers = 0
    """0: the agent stages whole versions. n: so many workers inside the engine stage them (pull.actor.Worker) and the
    agent leads them; `staged.tensors` is then empty and `staged.apply_on_workers()` has them apply."""

    def connected(self, weights: Actor) -> None:
        """The agent has begun to pull `weights`; with workers, have them connect to weights.workers_address.

        Called after every connection; replaces earlier ones. Raises EngineError.
        """

    def prepare(self, staged: StagedVersion, label: str) -> None:
        """What can be done while the engine still generates, such as writing files. Whatever it raises leaves the
        engine as it is."""

    def load(self, staged: StagedVersion, label: str) -> None:
        """Called while the engine stands still. When it returns the engine holds the version, and says `label` of
        every token that it samples from here on.

        Raises WeightsRefused only where the engine is certainly as it was; anything else means that it may hold half
        a version.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Give up groups, files and threads. The engine may be gone already."""


class FileLoader(WeightLoader):
    """The agent writes a version as safetensors, the engine reads it, and it is removed again.

    The files lie in EngineOptions.disk_path, or in memory; beside them is what the checkpoint has that is no weights.
    read_files(folder, label): see EngineControl.
    """

    def __init__(self, options: EngineOptions, read_files: Callable[[Path, str], None]):
        self._model, self._read_files = Path(options.model), read_files
        parent = Path(options.disk_path) if options.disk_path else MEMORY if MEMORY.is_dir() else None
        if options.disk_path:
            Path(options.disk_path).mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=f"torchtitan-{options.name}-", dir=parent))
        # An agent that is killed cannot remove what it wrote: the next one does.
        (self._folder / OWNER).write_text(f"{os.getpid()} {socket.gethostname()}")
        remove_abandoned(self._folder.parent)
        self._ready: Path | None = None

    def prepare(self, staged: StagedVersion, label: str) -> None:
        size = sum(tensor.nbytes for tensor in outlines(staged.tensors).values())
        free = shutil.disk_usage(self._folder).free
        if size > free:
            raise WeightsRefused(f"{self._folder} has {free >> 20} MiB free, the version takes {size >> 20} MiB")
        folder = self._folder / "version"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for file in self._model.iterdir():
            if file.is_file() and not file.name.endswith(WEIGHT_FILES):
                (folder / file.name).symlink_to(file.resolve())
        write_safetensors(folder / "model.safetensors", staged.tensors)
        self._ready = folder

    def load(self, staged: StagedVersion, label: str) -> None:
        folder, self._ready = self._ready, None
        if folder is None:
            raise WeightsRefused("no files were prepared")
        try:
            self._read_files(folder, label)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors (on any device) as one file, without a second copy of more than one of them in memory."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in outlines(tensors).items():
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tofile(file)


def remove_abandoned(parent: Path) -> None:
    """Remove the folders of agents of this machine that are gone. Other machines may have theirs here too."""
    for folder in parent.glob("torchtitan-*-*"):
        with contextlib.suppress(OSError, ValueError):
            process, host = (folder / OWNER).read_text().split(" ", 1)
            if host != socket.gethostname():
                continue
            try:
                os.kill(int(process), 0)
            except ProcessLookupError:
                shutil.rmtree(folder, ignore_errors=True)
