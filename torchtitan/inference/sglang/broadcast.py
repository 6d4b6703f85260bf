"""A version into SGLang by its own weight group, bucket by bucket."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchtitan.inference.agent.broadcast import BroadcastLoader, Group, Tensors, WeightGroup, described, in_one_piece
from torchtitan.inference.agent.control import EngineError
from torchtitan.inference.agent.engine import EngineOptions
from torchtitan.inference.base_weights import outlines
from torchtitan.inference.sglang.control import SGLangControl

# SGLang allocates what an order brings beside its weights; before 0.5.23 a flattened bucket twice.
BUCKET_BYTES = 256 * 2**20
# The oldest whose source was read for it: a bucket comes as one broadcast of bytes.
FLATTENED = (0, 5, 18)
# Since then weights are taken only between the beginning and the end of an update.
SESSIONS = (0, 5, 21)


def known_features(version: str) -> tuple[bool, bool]:
    """Whether a server that says it is `version` takes many parameters as one broadcast, and whether an update has a
    beginning and an end."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    # Of what has no such number nothing is expected; SGLang refuses an update that lacks its beginning.
    numbers = tuple(int(part) for part in found.groups()) if found else (0, 0, 0)
    return numbers >= FLATTENED, numbers >= SESSIONS


class SGLangBroadcastLoader(BroadcastLoader):
    """See agent.broadcast."""

    update_route = "/update_weights_from_distributed"

    def __init__(self, control: SGLangControl, options: EngineOptions):
        super().__init__(control, options)
        self._server_version = control.version
        self._name = ""
        self._flattened = self._sessions = False

    def make_group(self) -> Group:
        # Asked for every group: a server that somebody else started may have been started anew as another version.
        self._flattened, self._sessions = known_features(self._server_version())
        self._name = f"torchtitan-{secrets.token_hex(6)}"

        def invite(port: int) -> None:
            body = {"master_address": self._host, "master_port": port, "rank_offset": 1}
            # Also with GPUs, where SGLang copies to its own: NCCL would need one that no worker has, and nobody tried.
            body |= {"world_size": self._ranks + 1, "group_name": self._name, "backend": "gloo"}
            self._order("/init_weights_update_group", body)

        return WeightGroup(self._name, self._host, self._ranks, self._timeout_s, invite)

    def begin(self) -> None:
        if not self._sessions:
            return
        try:
            self._order("/begin_weight_update")
        except EngineError:
            # An update that broke off, this agent's or another's, has left one open.
            with contextlib.suppress(EngineError):
                self._order("/end_weight_update")
            self._order("/begin_weight_update")

    def updates(self, tensors: Tensors, label: str) -> Iterator[tuple[dict[str, Any], list[list[torch.Tensor]]]]:
        portions = list(buckets(outlines(tensors)))
        for names in portions:
            portion = {name: tensors[name] for name in names}
            body = described(portion, "dtypes") | {
                "group_name": self._name,
                # A flush that finds requests running ends SGLang's scheduler: the cache is reset by an order of its
                # own.
                "flush_cache": False,
                # The version is named with what completes it.
                "weight_version": label if names is portions[-1] else None,
            }
            if self._flattened:
                yield body | {"load_format": "flattened_bucket"}, [[in_one_piece(portion.values())]]
            else:
                yield body, [list(portion.values())]

    def end(self, label: str) -> None:
        if self._sessions:
            self._order("/end_weight_update")

    def leave(self) -> None:
        self._order("/destroy_weights_update_group", {"group_name": self._name})


def buckets(tensors: Mapping[str, torch.Tensor], size: int = BUCKET_BYTES) -> Iterator[list[str]]:
    """Names in portions of at most `size` bytes, one at least.

    SGLang reads tensors where they lie in a bucket, without padding: one that would not be aligned begins another.
    """
    names: list[str] = []
    taken = 0
    for name, tensor in tensors.items():
        if names and (taken + tensor.nbytes > size or taken % tensor.dtype.itemsize):
            yield names
            names, taken = [], 0
        names.append(name)
        taken += tensor.nbytes
    if names:
        yield names
