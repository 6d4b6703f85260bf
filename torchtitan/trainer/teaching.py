"""What the policy is compared with over the whole vocabulary (distill.divergence), one micro-batch at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from torchtitan.config.job_config import JobConfig
from torchtitan.distributed.device import device, queued_copy
from torchtitan.inference.types import Branch
from torchtitan.models.decoder import Decoder
from torchtitan.models.head.divergence_head import Comparison, TeacherStates, TopTokens
from torchtitan.models.head.logprob_head import HeadOptions
from torchtitan.models.layers.attention import PackedLayout
from torchtitan.models.lora import without_dropout
from torchtitan.trainer.packing import MicroBatch, teachers_tokens
from torchtitan.trainer.prefixes import keep_apart, merge


class _Operands:
    """A function of the head that returns the hidden states, and keeps the other operands here."""

    def __init__(self) -> None:
        self.weight: list[torch.Tensor] = []
        self.softcap: float | None = None

    def __call__(
        self,
        hidden: Sequence[torch.Tensor],
        weight: Sequence[torch.Tensor],
        targets: torch.Tensor,
        options: HeadOptions,
    ) -> tuple[torch.Tensor, ...]:
        # FSDP fills the same memory again when it next gathers the weight.
        self.weight, self.softcap = [part.detach() for part in weight], options.get("softcap")
        return tuple(hidden)


class Teaching:
    """The teacher of each source: one of `teachers` if the trainer holds it, the answers of distill.server, or
    else the policy itself as it is now, with another prompt (OPSD, Zhao et al. 2026; SDFT, Shenfeld et al. 2026; SDPO,
    Hübotter et al. 2026, equation 1).

    merged: what sequences begin with together is computed once, with the teacher's prompts, too.
    """

    def __init__(self, config: JobConfig, policy: Decoder, teachers: Mapping[str, Decoder], merged: bool):
        self._distill, self._temperature = config.distill, config.rollout.temperature or 1.0
        self._policy = policy
        self._teachers: dict[str, Any] = {"": policy, **teachers}
        self._merged = merged
        for teacher in teachers.values():
            if isinstance(teacher, FSDPModule):
                # Its head's weight is needed until the policy's backward is done with it.
                teacher.set_reshard_after_forward(False, recurse=False)

    @contextlib.contextmanager
    def compare(self, micro_batch: MicroBatch) -> Iterator[Comparison | None]:
        """Inside the block, forward and backward of the policy's head can use the comparison; None without a teacher.
        A collective."""
        kind, beta, name = self._distill.divergence, self._distill.jsd_beta, micro_batch.teacher
        if name is None:
            yield None
            return
        if name not in self._teachers:
            yield Comparison(top_tokens(micro_batch.trained, self._distill.top_k), kind, beta)
            return
        teacher = self._teachers[name]
        operands = _Operands()
        token_ids, layout, active = micro_batch.token_ids, micro_batch.layout, micro_batch.active
        if any(segment.hint_ids is not None for branch in micro_batch.trained for segment in branch.sampled):
            token_ids, layout, active = hinted(micro_batch.trained, self._merged)
        with torch.no_grad(), without_dropout(teacher):
            hidden = teacher(
                token_ids,
                layout,
                micro_batch.targets,
                self._temperature,
                micro_batch.kept,
                rows=active,
                function=operands,
            )
        yield Comparison(TeacherStates(hidden, operands.weight, operands.softcap), kind, beta)
        if teacher is not self._policy and isinstance(teacher, FSDPModule):
            teacher.reshard()


def hinted(branches: Sequence[Branch], merged: bool) -> tuple[torch.Tensor, PackedLayout, torch.Tensor]:
    """(tokens [T], their layout, the positions [A] that predict the sampled tokens, in the same order as for the
    policy): branches with what the teacher reads in place of their prompts."""
    sequences: list[np.ndarray] = []
    predicting: list[np.ndarray] = []
    for branch in branches:
        tokens = teachers_tokens(branch)
        sequences.append(tokens)
        # Behind another prompt, they are as many places later as that is longer.
        later = len(tokens) - (len(branch) - 1)
        predicting.append(np.array(branch.sampled_at) - 1 + later)
    runs = merge(sequences) if merged else keep_apart(sequences)
    packed = np.concatenate([sequences[number][first:end] for number, first, end in runs.sources])
    active = np.concatenate([places[at] for places, at in zip(runs.places, predicting, strict=True)])
    return (
        queued_copy(torch.from_numpy(packed.astype(np.int64)), device()),
        PackedLayout(runs.lengths, device(), runs.parents),
        queued_copy(torch.from_numpy(active), device()),
    )


def top_tokens(branches: Sequence[Branch], count: int) -> TopTokens:
    """What a server has said of all sampled tokens, in order."""
    ids: list[list[int]] = []
    log_probs: list[list[float]] = []
    for branch in branches:
        for segment in branch.sampled:
            for token_ids, scores in segment.teacher_top or []:
                ids.append(token_ids)
                log_probs.append(scores)
    return TopTokens(
        torch.tensor(ids, dtype=torch.int64, device=device()).view(-1, count),
        torch.tensor(log_probs, dtype=torch.float32, device=device()).view(-1, count),
    )
