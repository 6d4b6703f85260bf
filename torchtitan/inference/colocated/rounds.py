"""What travels with a GENERATE command, and what comes back: plain JSON, from rank 0 to all ranks and back."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from torchtitan.inference.types import Completion, GenerateRequest


@dataclass
class Round:
    """What the replicas do next: take requests on, drop some, and generate for a bounded number of engine steps."""

    label: str
    """Of the weights that every replica must hold; it generates nothing with others"""
    steps: int
    """Engine steps at most; a replica without work ends sooner"""
    requests: list[list[GenerateRequest]] = field(default_factory=list)
    """New ones, per replica"""
    cancelled: list[str] = field(default_factory=list)
    """Names of requests whose answer is not waited for any more"""

    def encode(self) -> bytes:
        requests = [[request.to_json() for request in mine] for mine in self.requests]
        return json.dumps({**vars(self), "requests": requests}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Round:
        fields = json.loads(data)
        fields["requests"] = [[GenerateRequest.from_json(one) for one in mine] for mine in fields["requests"]]
        return cls(**fields)


@dataclass
class Answer:
    """All completions of one request, or why the engine refused it."""

    request_id: str
    completions: list[Completion] = field(default_factory=list)
    refused: str = ""


def encode_answers(answers: list[Answer]) -> bytes:
    if not answers:
        return b""
    rows = [
        {**vars(answer), "completions": [completion.to_json() for completion in answer.completions]}
        for answer in answers
    ]
    return json.dumps(rows).encode()


def decode_answers(data: bytes) -> list[Answer]:
    if not data:
        return []
    return [
        Answer(row["request_id"], [Completion.from_json(one) for one in row["completions"]], row["refused"])
        for row in json.loads(data)
    ]
