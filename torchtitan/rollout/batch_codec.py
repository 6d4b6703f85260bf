"""Batches as one line of JSON: for the journal, for checkpoints and on the way to the other ranks.

Token ids and log-probs of all samples travel as base64 of little-endian arrays; log-probs keep their last bit.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy

from torchtitan.inference.types import VersionSpan
from torchtitan.rollout.types import Batch, Group, Sample

FORMAT = 1


def encode_batch(batch: Batch) -> bytes:
    """One line of JSON, without its newline.

    Raises:
        ValueError: a group without samples, or whose samples have different prompts.
    """
    return json.dumps(batch_to_json(batch), separators=(",", ":")).encode()


def decode_batch(data: bytes) -> Batch:
    """The inverse of encode_batch. Raises ValueError on anything else."""
    return batch_from_json(json.loads(data))


def batch_to_json(batch: Batch) -> dict[str, Any]:
    for group in batch.groups:
        if not group.samples or any(sample.prompt_ids != group.samples[0].prompt_ids for sample in group.samples):
            raise ValueError(f"group {group.prompt_index} is empty or mixes prompts")
    samples = batch.samples
    epochs = sorted({span.epoch for sample in samples for span in sample.spans})
    number = {epoch: i for i, epoch in enumerate(epochs)}
    spans = [(number[span.epoch], span.version, span.start, span.end) for sample in samples for span in sample.spans]
    prompts = [group.samples[0].prompt_ids for group in batch.groups]
    data: dict[str, Any] = {
        "format": FORMAT,
        "version": batch.version,
        "statistics": batch.statistics,
        "groups": [[group.prompt_index, len(group.samples)] for group in batch.groups],
        "prompt_lengths": [len(prompt) for prompt in prompts],
        "prompts": _pack(list(itertools.chain.from_iterable(prompts)), "<i4"),
        "lengths": [[len(sample.completion_ids), len(sample.log_probs), len(sample.spans)] for sample in samples],
        "completions": _pack([token for sample in samples for token in sample.completion_ids], "<i4"),
        "log_probs": _pack_floats([value for sample in samples for value in sample.log_probs]),
        "epochs": epochs,
        "spans": _pack(list(itertools.chain.from_iterable(spans)), "<i8"),
        "finish_reasons": [sample.finish_reason for sample in samples],
        "reward": [sample.reward for sample in samples],
        "rewards": [sample.rewards for sample in samples],
    }
    if any(sample.advantage for sample in samples):
        data["advantages"] = [sample.advantage for sample in samples]
    if any(sample.kept_token_ids is not None for sample in samples):
        data["kept"] = [
            None if sample.kept_token_ids is None else _pack_kept(sample.kept_token_ids) for sample in samples
        ]
    return data


def batch_from_json(data: dict[str, Any]) -> Batch:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError("not a recorded batch of this format")
    prompts = iter(_unpack(data["prompts"], "<i4"))
    tokens = iter(_unpack(data["completions"], "<i4"))
    log_probs = iter(_unpack_floats(data["log_probs"]))
    spans = iter(_unpack(data["spans"], "<i8"))
    epochs = data["epochs"]
    number = itertools.count()
    groups = []
    for (prompt_index, size), prompt_length in zip(data["groups"], data["prompt_lengths"], strict=True):
        prompt_ids = list(itertools.islice(prompts, prompt_length))
        samples = []
        for i in itertools.islice(number, size):
            token_count, log_prob_count, span_count = data["lengths"][i]
            flat = list(itertools.islice(spans, 4 * span_count))
            samples.append(
                Sample(
                    prompt_ids=prompt_ids,
                    completion_ids=list(itertools.islice(tokens, token_count)),
                    log_probs=list(itertools.islice(log_probs, log_prob_count)),
                    spans=[VersionSpan(epochs[flat[k]], *flat[k + 1 : k + 4]) for k in range(0, len(flat), 4)],
                    finish_reason=data["finish_reasons"][i],
                    reward=data["reward"][i],
                    rewards=data["rewards"][i],
                    kept_token_ids=_unpack_kept(data["kept"][i]) if data.get("kept") else None,
                    advantage=data["advantages"][i] if data.get("advantages") else 0.0,
                )
            )
        groups.append(Group(prompt_index, samples))
    return Batch(data["version"], groups, data["statistics"])


def _pack(values: Sequence[int], dtype: str) -> str:
    return base64.b64encode(numpy.asarray(values, dtype=dtype).tobytes()).decode()


def _unpack(text: str, dtype: str) -> list[Any]:
    return numpy.frombuffer(base64.b64decode(text, validate=True), dtype=dtype).tolist()


def _pack_floats(values: Sequence[float]) -> list[str]:
    """Engines report float32 values, so four bytes hold them exactly; anything finer takes eight."""
    wide = numpy.asarray(values, dtype="<f8")
    with numpy.errstate(over="ignore"):
        narrow = wide.astype("<f4")
    chosen = narrow if numpy.array_equal(narrow.astype("<f8"), wide) else wide
    return [chosen.dtype.str, base64.b64encode(chosen.tobytes()).decode()]


def _unpack_floats(data: list[str]) -> list[float]:
    dtype, text = data
    if dtype not in ("<f4", "<f8"):
        raise ValueError(f"log-probs of an unknown type {dtype!r}")
    return _unpack(text, dtype)


def _pack_kept(kept: list[list[int]]) -> list[Any]:
    return [[len(ids) for ids in kept], _pack(list(itertools.chain.from_iterable(kept)), "<i4")]


def _unpack_kept(data: list[Any] | None) -> list[list[int]] | None:
    if data is None:
        return None
    ids = iter(_unpack(data[1], "<i4"))
    return [list(itertools.islice(ids, length)) for length in data[0]]
