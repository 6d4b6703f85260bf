"""Hand-over by files: the agent writes a version as safetensors, the engine reads it, and it is removed again."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from torchtitan.inference.agent.engine import EngineOptions
from torchtitan.inference.base_weights import outlines
from torchtitan.weight_sync.staging import StagedVersion, WeightsRefused

MEMORY = Path("/dev/shm")
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
# In each agent's folder: the process and the machine that it belongs to.
OWNER = "owner"
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json", ".bin.index.json")


class DiskHandOver:
    """What the engines' disk routes have in common; `read_files` is the engine's own part.

    The files lie in EngineOptions.disk_path, or in memory; beside them is what the checkpoint has that is no weights.
    """

    workers = 0

    def __init__(self, options: EngineOptions):
        self._model = Path(options.model)
        parent = Path(options.disk_path) if options.disk_path else MEMORY if MEMORY.is_dir() else None
        if options.disk_path:
            Path(options.disk_path).mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=f"torchtitan-{options.name}-", dir=parent))
        # An agent that is killed cannot remove what it wrote: whoever comes next does.
        (self._folder / OWNER).write_text(f"{os.getpid()} {socket.gethostname()}")
        remove_abandoned(self._folder.parent)
        self._ready: Path | None = None

    def connected(self, leader: str, actor: str, epoch: str, token: str) -> None:
        """Nothing has to be told to the engine."""

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
            self.read_files(folder, label)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def read_files(self, folder: Path, label: str) -> None:
        """Have the engine, which stands still, read `folder` like a checkpoint and serve it as `label`."""
        raise NotImplementedError

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
