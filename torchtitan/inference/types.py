"""What goes to an engine and what comes back, tokens in, tokens out, and the trajectories that it leaves for training.
No torch here; what goes over the wire is JSON-able.

A trajectory is what one conversation with the policy leaves: a list of branches. A branch is a sequence of tokens in
segments: some were given to the policy (the prompt, what an environment answered), some were sampled from it. What was
sampled is trained, what was given never is. One prompt with one completion is the branch of two segments.

A recorder of calls makes a trajectory with add_turn alone. A call whose prompt goes on from a branch
extends it; one that does not (a program has rewritten its history, or talks to the policy twice at a time) begins a
branch of its own. There, all of its prompt is given, so that a token that was sampled before is trained in the branch
where it was sampled, and nowhere else.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from torchtitan.models.shape.mixture_args import MISSING

if TYPE_CHECKING:
    import numpy as np

FinishReason = Literal["stop", "length", "abort"]
Tag = Literal["weights", "kv_cache"]
"""A part of an engine's memory that goes when it sleeps, and comes back when it wakes"""
TAGS: tuple[Tag, ...] = ("weights", "kv_cache")
"""In the order in which they wake"""
# Of a request: so many are told.
MAX_MISTAKES = 5


@dataclass(frozen=True, eq=False)
class Routes:
    """Of the tokens of a prompt and its completion from number `first` on, but for the last, which nothing followed.

    experts: [tokens, layers, experts per token], uint8 or (for more than 256) uint16; layers without experts hold 0.
    """

    first: int
    experts: np.ndarray

    def to_json(self) -> dict[str, Any]:
        """Little-endian numbers as base64."""
        import numpy as np  # as in the other functions: who only plans a run has no routes

        experts = np.ascontiguousarray(self.experts)
        data = base64.b64encode(experts.astype(experts.dtype.newbyteorder("<"), copy=False).tobytes()).decode()
        return {"first": self.first, "shape": list(experts.shape), "bytes": experts.itemsize, "experts": data}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Routes:
        """Raises ValueError, KeyError or TypeError for anything else."""
        import numpy as np

        dtype = {1: "<u1", 2: "<u2"}[data["bytes"]]
        experts = np.frombuffer(base64.b64decode(data["experts"], validate=True), dtype)
        return cls(int(data["first"]), experts.reshape(tuple(int(size) for size in data["shape"])))


def compact(experts: np.ndarray) -> np.ndarray:
    """In the smallest type that holds these numbers of experts. Raises ValueError where they are none."""
    if experts.size and not 0 <= int(experts.min()) <= int(experts.max()) < 1 << 16:
        raise ValueError(f"experts are numbered {int(experts.min())} to {int(experts.max())}")
    largest = int(experts.max()) if experts.size else 0
    return experts.astype("uint8" if largest < 1 << 8 else "uint16")


def check_routes(routes: Routes, tokens: int) -> None:
    """Raise ValueError unless these can be the routes of a prompt and completion of so many tokens."""
    shape = routes.experts.shape
    if len(shape) != 3 or not 0 <= routes.first <= tokens - 1 or shape[0] != tokens - 1 - routes.first:
        text = f"{list(shape)} numbers of experts were returned from token {routes.first} on, for {tokens} tokens"
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
    teacher_top: list[tuple[list[int], list[float]]] | None = None
    """Ids and log-probs of the likeliest tokens in the place of each, where that teacher was asked for them"""
    hint_ids: list[int] | None = None
    """What the teacher reads in place of the prompt"""
    actor: str = ""
    """Name of the actor that sampled it"""
    asked_at: int | None = field(default=None, compare=False)
    """The newest version that the actor was known to hold when it was asked. None: not known, or the actor is not one
    of this start of the run: so it says nothing about the sample, and a recorded one is equal to it"""

    def first(self, length: int) -> Completion:
        """Return its first tokens, as if sampling had stopped there."""
        routes, spans = self.routes, [span for span in self.spans if span.start < length]
        if routes is not None:
            kept = routes.experts[: max(0, len(routes.experts) - len(self.token_ids) + length)]
            routes = Routes(routes.first, kept)
        return Completion(
            self.token_ids[:length],
            self.log_probs[:length],
            "stop",
            [replace(span, end=min(span.end, length)) for span in spans],
            None if self.kept_token_ids is None else self.kept_token_ids[:length],
            routes,
            actor=self.actor,
            asked_at=self.asked_at,
        )

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
    single_turn: bool = False
    """No later request goes on where this one ends, so an engine need not remember much of it"""

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "sampling": dict(vars(self.sampling))}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GenerateRequest:
        return cls(**{**data, "sampling": SamplingParameters(**data["sampling"])})


@dataclass(frozen=True)
class EngineCall:
    """One POST to an engine's server."""

    path: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Capabilities:
    """What an actor can do beyond sampling, as its /health says it."""

    engine: str
    """The name of its folder in inference/engines"""
    version: str = ""
    """Of the engine's package"""
    score: bool = False
    """It gives the log-probs of tokens that it is given"""
    digest: bool = False
    """It recomputes the checksums of a version from the tensors that it computes with"""
    sleep: bool = False
    """Asleep it takes less memory"""
    route: str = ""
    """How weights get into a foreign engine: direct or agent"""

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class ScoredTokens:
    """Log-probs at temperature 1 of all tokens but the first, each given those before it, under one version."""

    log_probs: list[float]
    epoch: str
    version: int


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


class NoVersion(ValueError):
    """An engine's answer comes from weights that are not a version of this run."""


class Body(BaseModel):
    """The JSON object that a server is asked with."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @classmethod
    def read(cls, data: dict[str, Any], wrong: type[Exception]) -> Self:
        """Raises `wrong`, which says what is."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise wrong(mistakes_of(error)) from None


def mistakes_of(error: ValidationError) -> str:
    """What is wrong with a JSON object, in one line."""
    texts = []
    for mistake in error.errors(include_url=False)[:MAX_MISTAKES]:
        text = mistake["msg"].removeprefix("Value error, ").replace("Input should", "it must")
        got = "" if mistake["type"] == "missing" else f", got {mistake['input']!r:.100}"
        texts.append(f"{'.'.join(map(str, mistake['loc']))}: {text}{got}")
    return "; ".join(texts)


@dataclass
class Given:
    """Tokens that the policy read and did not sample here."""

    token_ids: list[int]


Segment = Given | Completion


@dataclass
class Branch:
    """One sequence of tokens, as the policy has read and sampled it, from its first token to its last."""

    segments: list[Segment]
    trainer_log_probs: Any = None
    """Of its sampled tokens before the batch's first optimizer step (a tensor), where this process computed them"""

    @property
    def token_ids(self) -> list[int]:
        """All tokens, given and sampled."""
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def sampled(self) -> list[Completion]:
        """The sampled segments."""
        return [segment for segment in self.segments if isinstance(segment, Completion)]

    @property
    def sampled_at(self) -> list[int]:
        """The place of every sampled token among token_ids: the mask of what is trained."""
        places: list[int] = []
        end = 0
        for segment in self.segments:
            begin, end = end, end + len(segment.token_ids)
            if isinstance(segment, Completion):
                places += range(begin, end)
        return places

    def __len__(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)


def add_turn(branches: list[Branch], prompt_ids: Sequence[int], completion: Completion) -> Branch:
    """Record that the policy sampled `completion` behind `prompt_ids`; returns the branch that ends with it now.

    It extends the longest branch that prompt_ids begins with, whole: what prompt_ids has beyond it is given. Without
    such a branch it begins a new one, at the end of `branches`.
    """
    prompt_ids = list(prompt_ids)
    for branch in sorted(branches, key=len, reverse=True):
        held = branch.token_ids
        if prompt_ids[: len(held)] == held:
            branch.segments += [Given(prompt_ids[len(held) :])] if len(prompt_ids) > len(held) else []
            branch.segments.append(completion)
            return branch
    branches.append(Branch([Given(prompt_ids), completion]))
    return branches[-1]


def sampled_segments(branches: Sequence[Branch]) -> list[Completion]:
    """Everything that was sampled, branch by branch."""
    return [completion for branch in branches for completion in branch.sampled]


def sampled_tokens(branches: Iterable[Branch]) -> int:
    """How many tokens of these branches were sampled."""
    return sum(len(completion.token_ids) for branch in branches for completion in branch.sampled)


def joined_spans(completions: Sequence[Completion]) -> list[VersionSpan]:
    """The spans of completions behind each other: positions count the tokens of all of them, and neighbours of the
    same version are one span."""
    spans: list[VersionSpan] = []
    begin = 0
    for completion in completions:
        for span in completion.spans:
            last = spans[-1] if spans else None
            if last is not None and (last.epoch, last.version, last.end) == (
                span.epoch,
                span.version,
                begin + span.start,
            ):
                last.end = begin + span.end
            else:
                spans.append(VersionSpan(span.epoch, span.version, begin + span.start, begin + span.end))
        begin += len(completion.token_ids)
    return spans


def branch_routes(branch: Branch) -> np.ndarray | None:
    """int16 [tokens - 1, layers, experts per token], MISSING where nothing is known; None where that is everything.

    A completion tells of all that was read before it, too: of what is told twice the first counts, which is how the
    sampled tokens came about.
    """
    import numpy as np

    rows: np.ndarray | None = None
    end = 0
    for segment in branch.segments:
        end += len(segment.token_ids)
        if not isinstance(segment, Completion) or segment.routes is None:
            continue
        routes = segment.routes
        if rows is None:
            rows = np.full((len(branch) - 1, *routes.experts.shape[1:]), MISSING, np.int16)
        place = rows[routes.first : end - 1]
        np.copyto(place, routes.experts[: len(place)], where=place[:, :1, :1] == MISSING)
    return rows
