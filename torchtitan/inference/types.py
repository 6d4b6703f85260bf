"""What goes to an engine and what comes back: tokens in, tokens out. No torch here; everything is JSON-able."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from typing_extensions import Self

FinishReason = Literal["stop", "length", "abort"]
Tag = Literal["weights", "kv_cache"]
"""A part of an engine's memory that goes when it sleeps, and comes back when it wakes"""
TAGS: tuple[Tag, ...] = ("weights", "kv_cache")
"""In the order in which they wake"""
# Of a request: so many are told.
MOST_MISTAKES = 5


@dataclass(frozen=True, eq=False)
class Routes:
    """Of the tokens of a prompt and its completion from number `first` on, but for the last, which nothing followed.

    experts: [tokens, layers, experts per token], uint8 or (for more than 256) uint16; layers without experts hold 0.
    """

    first: int
    experts: np.ndarray

    def to_json(self) -> dict[str, Any]:
        """Little-endian numbers as base64."""
        experts = np.ascontiguousarray(self.experts)
        data = base64.b64encode(experts.astype(experts.dtype.newbyteorder("<"), copy=False).tobytes()).decode()
        return {"first": self.first, "shape": list(experts.shape), "bytes": experts.itemsize, "experts": data}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Routes:
        """Raises ValueError, KeyError or TypeError for anything else."""
        dtype = {1: "<u1", 2: "<u2"}[data["bytes"]]
        experts = np.frombuffer(base64.b64decode(data["experts"], validate=True), dtype)
        return cls(int(data["first"]), experts.reshape(tuple(int(size) for size in data["shape"])))


def compact(experts: np.ndarray) -> np.ndarray:
    """In the smallest type that holds these numbers of experts. Raises ValueError where they are none."""
    if experts.size and not 0 <= int(experts.min()) <= int(experts.max()) < 1 << 16:
        raise ValueError(f"experts are numbered {int(experts.min())} to {int(experts.max())}")
    return experts.astype(np.uint8 if not experts.size or int(experts.max()) < 1 << 8 else np.uint16)


def check_routes(routes: Routes, tokens: int) -> None:
    """Raise ValueError unless these can be the routes of a prompt and completion of so many tokens."""
    shape = routes.experts.shape
    if len(shape) != 3 or not 0 <= routes.first <= tokens - 1 or shape[0] != tokens - 1 - routes.first:
        text = f"{list(shape)} numbers of experts from token {routes.first} on came for {tokens} tokens"
        raise ValueError(f"{text}: one row is needed for each but the last")


@dataclass
class SamplingParameters:
    """How completions of one prompt are sampled. temperature 0 is greedy; log-probs are then those at temperature 1."""

    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: list[int] = field(default_factory=list)
    seed: int = 0
    """Sample i of the request draws from a stream seeded by (seed, i): independent of what else is running"""
    routes: bool = False
    """Tell which experts each token had"""

    @property
    def truncated(self) -> bool:
        """Whether some tokens are left out before sampling (greedy decoding leaves none out)."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


def stream_seed(*parts: object) -> int:
    """A seed for these parts, of 48 bits, which every engine and every JSON reader can hold: what is redone after a
    failure or a resume draws the same random numbers."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=6).digest(), "little")


@dataclass
class VersionSpan:
    """Tokens [start, end) of a completion were sampled under weights `version` of training epoch `epoch`."""

    epoch: str
    version: int
    start: int
    end: int


@dataclass
class Completion:
    """One sampled continuation. Its stop token, where it ended with one, is the last of token_ids."""

    token_ids: list[int]
    log_probs: list[float]
    """Behaviour log-prob of each token, under the temperature and the kept tokens it was sampled with"""
    finish_reason: FinishReason
    spans: list[VersionSpan]
    kept_token_ids: list[list[int]] | None = None
    """With top-p / top-k / min-p: per token, the ids that truncation kept (empty list: all)"""
    routes: Routes | None = None
    """Where they were asked for"""
    teacher_log_probs: list[float] | None = None
    """Of each token, where a teacher behind a server was asked"""

    def to_json(self) -> dict[str, Any]:
        # asdict copies every list element by element: a cost per token.
        routes = None if self.routes is None else self.routes.to_json()
        return {**vars(self), "spans": [dict(vars(span)) for span in self.spans], "routes": routes}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Completion:
        routes = None if data.get("routes") is None else Routes.from_json(data["routes"])
        return cls(**{**data, "spans": [VersionSpan(**span) for span in data["spans"]], "routes": routes})


@dataclass
class GenerateRequest:
    """Sample `sampling.n` completions of one prompt. `request_id` makes a retry on another actor recognisable."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParameters

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "sampling": dict(vars(self.sampling))}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GenerateRequest:
        return cls(data["request_id"], data["prompt_ids"], SamplingParameters(**data["sampling"]))


def make_label(epoch: str, version: int) -> str:
    """`<epoch>/<version>`: the label under which a foreign engine serves a version. It comes back with every token.

    Raises ValueError where it could not be read back.
    """
    label = f"{epoch}/{version}"
    if parse_label(label) != (epoch, version):
        raise ValueError(f"epoch {epoch!r}, version {version}: cannot be a label")
    return label


def parse_label(label: object) -> tuple[str, int] | None:
    """(epoch, version), or None where it is none of ours: weights that the engine has from elsewhere."""
    if not isinstance(label, str):
        return None
    epoch, slash, version = label.rpartition("/")
    return (epoch, int(version)) if slash and epoch and version.isascii() and version.isdigit() else None


class Body(BaseModel):
    """The JSON object that a server is asked with."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @classmethod
    def read(cls, data: dict[str, Any], wrong: type[Exception]) -> Self:
        """Raises `wrong`, which says what is."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            texts = []
            for one in error.errors(include_url=False)[:MOST_MISTAKES]:
                text = one["msg"].removeprefix("Value error, ").replace("Input should", "it must")
                got = "" if one["type"] == "missing" else f", got {one['input']!r:.100}"
                texts.append(f"{'.'.join(map(str, one['loc']))}: {text}{got}")
            raise wrong("; ".join(texts)) from None
