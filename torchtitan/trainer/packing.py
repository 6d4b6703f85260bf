"""Packs scored samples into micro-batches, deterministically and alike on every rank, so that ranks have equal work."""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from torchtitan.distributed.device import queued_copy
from torchtitan.errors import UserError
from torchtitan.grpo.objectives import Objective
from torchtitan.inference.types import Branch, Given, branch_routes, sampled_tokens
from torchtitan.models.head.logit_tiles import KeptTokens
from torchtitan.models.layers.attention import PackedLayout
from torchtitan.models.shape.mixture_args import MISSING
from torchtitan.models.shape.model_args import ModelArgs
from torchtitan.rollout.types import Batch, Group, Sample
from torchtitan.trainer.prefixes import clusters, keep_apart, merge


def packed_routes(branches: Sequence[Branch], args: ModelArgs) -> torch.Tensor:
    """Routing replay: the experts with which the engine computed each token, int16 [T, layers, k], for concatenated
    sequences without their last tokens; MISSING where the engine has not reported them.

    The smallest difference in its input may change a mixture router's choice, and the trainer then differentiates
    another policy than the one that was sampled from. With the engine's choice the two agree. The weights of the chosen
    experts are always the trainer's own, so the router learns (Ma et al. 2025, "Stabilizing MoE Reinforcement Learning
    by Aligning Training and Inference Routers").

    Raises UserError if these are not experts of the model.
    """
    assert args.experts is not None
    layers, per_token = args.num_hidden_layers, args.experts.per_token
    rows = [_routes(branch, args) for branch in branches]
    return torch.from_numpy(np.concatenate(rows) if rows else np.full((1, layers, per_token), MISSING, np.int16))


def _routes(branch: Branch, args: ModelArgs) -> np.ndarray:
    assert args.experts is not None
    layers, per_token = args.num_hidden_layers, args.experts.per_token
    routes, tokens = branch_routes(branch), len(branch) - 1
    if routes is None:
        routes = np.full((tokens, layers, per_token), MISSING, np.int16)
    if routes.size != tokens * layers * per_token or int(routes.max(initial=0)) >= args.experts.count:
        raise UserError(
            f"grpo.routing_replay: an engine names experts up to {int(routes.max(initial=0))}, "
            f"{routes.size // max(tokens, 1)} for each token; this model has {args.experts.count} experts, "
            f"{layers} layers × {per_token} for each token: does the engine serve another model?"
        )
    # SGLang returns flat numbers, which the reader must divide into layers.
    return routes.reshape(tokens, layers, per_token)


def token_array(branch: Branch) -> np.ndarray:
    """int64 [tokens]: all tokens of a branch, given and sampled."""
    return np.concatenate([np.array(segment.token_ids, np.int64) for segment in branch.segments])


def identities(branch: Branch, replayed: ModelArgs | None) -> np.ndarray:
    """uint64 [tokens - 1]: equal numbers, behind equal ones, are tokens that the policy computes alike. With routing
    replay a token's experts are a part of it, as a 64-bit multilinear hash (Carter & Wegman 1979)."""
    found = token_array(branch)[:-1].view(np.uint64)
    if replayed is not None:
        routes = _routes(branch, replayed).reshape(len(found), -1).astype(np.uint64)
        factors = np.random.default_rng(0).integers(2**64, size=routes.shape[1], dtype=np.uint64)
        found = found + (routes * factors).sum(1, dtype=np.uint64)
    return found


def teachers_tokens(branch: Branch) -> np.ndarray:
    """uint64 [tokens]: the inputs of a teacher that reads a hint in place of the branch's prompt, if it has one."""
    prompt, hint = len(branch.segments[0].token_ids), branch.sampled[0].hint_ids if branch.sampled else None
    token_ids = token_array(branch)[:-1]
    if hint is not None:
        token_ids = np.concatenate((np.array(hint, np.int64), token_ids[prompt:]))
    return token_ids.view(np.uint64)


def balanced_bins(sizes: Sequence[int], budget: int, ranks: int) -> list[list[int]]:
    """Group indices of `sizes` into bins whose sums stay within budget, in a number that `ranks` divides: the largest
    first, each into the emptiest bin (Graham 1969, LPT). The fullest bins come first, so that ranks which take every
    ranks-th one compute equally much at a time. Some are empty if there are fewer items than ranks.

    Raises:
        ValueError: an item is larger than the budget.
    """
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    if order and sizes[order[0]] > budget:
        raise ValueError(f"a sequence of {sizes[order[0]]} tokens does not fit into a micro-batch of {budget}")
    # Neither fewer than the sum needs, nor than items of which no two fit together.
    least = max(-(-sum(sizes) // budget), sum(2 * size > budget for size in sizes), 1)
    count = -(-least // ranks) * ranks
    while True:
        bins: list[list[int]] = [[] for _ in range(count)]
        filled = [(0, place) for place in range(count)]
        for index in order:
            tokens, place = filled[0]
            heapq.heapreplace(filled, (tokens + sizes[index], place))
            bins[place].append(index)
        if max(filled)[0] <= budget:
            fullest_first = sorted(filled, key=lambda entry: (-entry[0], entry[1]))
            return [sorted(bins[place]) for _, place in fullest_first]
        count += ranks


def balanced_clusters(
    identified: Sequence[np.ndarray],
    trained: Sequence[int],
    budget: int,
    ranks: int,
    taught: Sequence[np.ndarray] | None = None,
) -> list[list[int]]:
    """Like balanced_bins, for sequences (identities [tokens], and how many of them are trained) of which those that
    begin alike are computed together; for `taught` see clusters(). Groups are cut where the fullest ranks then compute
    less in all, although each part of a group computes again what the group begins with."""
    share = sum(map(len, identified)) // ranks
    found = []
    for part in (0, 1, 2, 4, 8) if ranks > 1 else (0,):
        members, sizes = clusters(identified, trained, min(budget, share // part) if part else budget, taught)
        bins = balanced_bins(sizes, budget, ranks)
        tokens: list[int] = []
        together: list[list[int]] = []
        for chosen in bins:
            tokens.append(sum(sizes[cluster] for cluster in chosen))
            together.append(sorted(itertools.chain.from_iterable(members[cluster] for cluster in chosen)))
        slowest = [max(tokens[first : first + ranks]) for first in range(0, len(bins), ranks)]
        found.append((sum(slowest), together))
    return min(found, key=lambda candidate: candidate[0])[1]


def minibatches(batch: Batch, count: int) -> list[list[Group]]:
    """Divide the batch into `count` parts of whole groups, which keep their order.

    The groups of each source are dealt out to the parts in turn, and within a source those of a curriculum's pass over
    all prompts. So of every source, and of every source's passes, two parts differ by at most one group, in whatever
    rhythm these come in the batch. Without sources and a curriculum, group i goes to part i mod count.
    """
    kinds = [(group.source, group.from_pass) for group in batch.groups]
    dealt = sorted(range(len(kinds)), key=kinds.__getitem__)
    parts: list[list[Group]] = []
    for part in range(count):
        places = sorted(dealt[part::count])
        parts.append([batch.groups[place] for place in places])
    return parts


@dataclass
class MicroBatch:
    """Packed sequences: inputs are tokens [0, L-1) of each, which predict its tokens [1, L). What sequences begin with
    together is in the T tokens once.

    Everything but token_ids [T] has one entry per active position [A], which is a position of a sequence that predicts
    a sampled token: the head computes nothing for given tokens, and a position of several sequences once for each.
    """

    token_ids: torch.Tensor
    targets: torch.Tensor
    """[A] int64: the tokens that the active positions predict"""
    layout: PackedLayout
    active: torch.Tensor
    """[A] int64: indices of active positions among the T; sequences may share some"""
    sequence: torch.Tensor
    """[A] int64: which sequence each active position belongs to"""
    advantages: torch.Tensor
    """[A]"""
    behaviour_log_probs: torch.Tensor
    """[A]"""
    weights: torch.Tensor
    """[A] the objective's token weights, normalised over the whole minibatch of all ranks"""
    same_version: torch.Tensor
    """[A] bool: tokens of trajectories that were sampled entirely by the version that this batch trains"""
    actors: torch.Tensor
    """[A] int64: which of the batch's actors sampled it, where all that it follows was computed by the version that
    this batch trains; else their number"""
    kept: KeptTokens | None
    """Of the active positions, and behind them the observed ones"""
    trained: list[Branch]
    """The branches whose sampled tokens the active positions predict, in order"""
    teacher: str | None = None
    """What the policy is compared with on all of them, as teacher_id() says it"""
    teacher_log_probs: torch.Tensor | None = None
    """[A], if a teacher behind a server has provided them"""
    routes: torch.Tensor | None = None
    """[T, layers, k] int16: the experts of each token, see packed_routes"""
    routed: tuple[int, int] = (0, 0)
    """The number of tokens for which the engine reported experts, and for which it was to report them"""
    occurrences: torch.Tensor | None = None
    """[T] int64: how many sequences each token is of, 0 for the inert one"""
    num_sequences: int = 1
    inputs: int = 0
    """Tokens of all sequences, each counted on its own; T are computed"""
    observed: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """[O] int64: indices among the T of positions that predict what an environment wrote, with an observation loss"""
    observed_targets: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """[O] int64: the tokens that these predict"""
    observation_weight: float = 0.0
    """Of each of these tokens, normalised over the whole minibatch of all ranks"""


def trained_tokens(sample: Sample, mask_truncated: bool) -> int:
    """How many of a sample's tokens enter the loss: all sampled ones, or none."""
    if mask_truncated and sample.finish_reason == "length":
        return 0
    return sampled_tokens(sample.branches)


def turn_advantages(sample: Sample, branch: Branch) -> list[float]:
    """The advantage of every sampled segment of one of the sample's branches."""
    if not sample.turn_advantages:
        return [sample.advantage] * len(branch.sampled)
    begin = 0
    for earlier in sample.branches:
        if earlier is branch:
            break
        begin += len(earlier.sampled)
    return sample.turn_advantages[begin : begin + len(branch.sampled)]


def pack(
    rows: list[tuple[Sample, Branch]],
    weights: list[float],
    version: int,
    mask_truncated: bool,
    device: torch.device,
    replayed: ModelArgs | None = None,
    merged: bool = False,
    observation_weight: float = 0.0,
    teacher: str | None = None,
    actors: Sequence[str] = (),
) -> MicroBatch:
    """Pack whole branches into one micro-batch; without any, use one inert token (a rank must join every collective).

    replayed: the model, if its experts are to be the engine's. merged: what branches begin with together is there once.
    observation_weight: of each token that an environment wrote; with 0 the head computes nothing for these. actors: the
    names of those whose log-probs are judged.
    """
    number_of = {name: number for number, name in enumerate(actors)}
    tokens_of = [token_array(branch) for _, branch in rows]
    if replayed is None:
        identified = [tokens[:-1].view(np.uint64) for tokens in tokens_of]
    else:
        identified = [identities(branch, replayed) for _, branch in rows]
    runs = merge(identified) if merged else keep_apart(identified)
    # Arrays of whole completions: a step trains some 100,000 tokens, and the GPU waits meanwhile.
    columns = _Columns()
    trained: list[Branch] = []
    kept_ids: list[list[int]] = []
    truncated = any(completion.kept_token_ids for _, branch in rows for completion in branch.sampled)
    for number, ((sample, branch), weight) in enumerate(zip(rows, weights, strict=True)):
        if not trained_tokens(sample, mask_truncated) or not sampled_tokens([branch]):
            continue
        trained.append(branch)
        # Tokens that follow those of an older version may have been sampled with its KV cache.
        of_version = all(span.version == version for span in sample.spans)
        advantages = iter(turn_advantages(sample, branch))
        end = 0
        for place, segment in enumerate(branch.segments):
            begin, end = end, end + len(segment.token_ids)
            predicted, predicting = tokens_of[number][begin:end], runs.places[number][max(begin - 1, 0) : end - 1]
            if isinstance(segment, Given):
                if place and observation_weight:
                    columns.observed.append(predicting)
                    columns.observed_targets.append(predicted)
                continue
            count = end - begin
            known = of_version and segment.asked_at is not None and segment.asked_at >= version
            actor = number_of.get(segment.actor, len(actors)) if known else len(actors)
            columns.active.append(predicting)
            columns.targets.append(predicted)
            columns.behaviour.append(np.array(segment.log_probs, np.float32))
            columns.taught.append(np.array(segment.teacher_log_probs or (), np.float32))
            for column, value in (
                (columns.sequence, np.int64(number)),
                (columns.advantages, np.float32(next(advantages))),
                (columns.weights, np.float32(weight)),
                (columns.same_version, np.bool_(of_version)),
                (columns.sampled_by, np.int64(actor)),
            ):
                column.append(np.full(count, value))
            if truncated:
                kept_ids += segment.kept_token_ids or [[]] * count
    inputs = [len(tokens) - 1 for tokens in tokens_of]
    occurrences = np.zeros(max(sum(runs.lengths), 1), np.int64)
    for path in runs.places:
        occurrences[path] += 1
    tokens = [tokens_of[number][first:end] for number, first, end in runs.sources] or [np.zeros(1, np.int64)]
    routes, routed = None, (0, 0)
    if replayed is not None:
        routes = packed_routes([branch for _, branch in rows], replayed)
        routed = (int((routes[:, 0, 0] != MISSING).sum()), sum(inputs))
        of_rows = routes.split(inputs or [1])
        routes = torch.cat([of_rows[number][first:end] for number, first, end in runs.sources or [(0, 0, 1)]])
        routes = queued_copy(routes, device)
    joined = functools.partial(_joined, device)
    observed = joined(columns.observed, np.int64)
    taught = joined(columns.taught, np.float32)
    kept = None
    if truncated:
        # Behind the sampled tokens come the observed ones, of which every token is kept.
        kept = KeptTokens.from_rows([*kept_ids, *([] for _ in observed)], device)
    return MicroBatch(
        routes=routes,
        routed=routed,
        occurrences=queued_copy(torch.from_numpy(occurrences), device),
        num_sequences=max(len(rows), 1),
        inputs=sum(inputs),
        teacher_log_probs=taught if len(taught) else None,
        token_ids=joined(tokens, np.int64),
        targets=joined(columns.targets, np.int64),
        layout=PackedLayout(runs.lengths or [1], device, runs.parents or [-1]),
        active=joined(columns.active, np.int64),
        sequence=joined(columns.sequence, np.int64),
        advantages=joined(columns.advantages, np.float32),
        behaviour_log_probs=joined(columns.behaviour, np.float32),
        weights=joined(columns.weights, np.float32),
        same_version=joined(columns.same_version, np.bool_),
        actors=joined(columns.sampled_by, np.int64),
        observed=observed,
        observed_targets=joined(columns.observed_targets, np.int64),
        observation_weight=observation_weight,
        kept=kept,
        trained=trained,
        teacher=teacher,
    )


@dataclass
class _Columns:
    """What `pack` collects for the fields of MicroBatch: an array for each completion, or for what was observed behind
    one."""

    active: list[np.ndarray] = field(default_factory=list)
    targets: list[np.ndarray] = field(default_factory=list)
    sequence: list[np.ndarray] = field(default_factory=list)
    advantages: list[np.ndarray] = field(default_factory=list)
    behaviour: list[np.ndarray] = field(default_factory=list)
    weights: list[np.ndarray] = field(default_factory=list)
    same_version: list[np.ndarray] = field(default_factory=list)
    sampled_by: list[np.ndarray] = field(default_factory=list)
    taught: list[np.ndarray] = field(default_factory=list)
    observed: list[np.ndarray] = field(default_factory=list)
    observed_targets: list[np.ndarray] = field(default_factory=list)


def _joined(device: torch.device, arrays: list[np.ndarray], dtype: type[np.generic]) -> torch.Tensor:
    joined = np.concatenate(arrays) if arrays else np.empty(0, dtype)
    return queued_copy(torch.from_numpy(joined.astype(dtype, copy=False)), device)


def micro_batches(
    samples: list[Sample],
    objective: Objective,
    *,
    version: int,
    budget: int,
    max_completion_tokens: int,
    mask_truncated: bool,
    rank: int,
    ranks: int,
    device: torch.device,
    replayed: ModelArgs | None = None,
    merged: bool = False,
    observation_coefficient: float = 0.0,
    teachers: Sequence[str | None] | None = None,
    actors: Sequence[str] = (),
) -> list[MicroBatch]:
    """This rank's share of a minibatch. Every rank gets the same number of micro-batches, each of at most `budget`
    tokens that are computed, by the policy or by a teacher with hints, and as many that are trained.

    teachers: of each sample, what the policy is compared with. A micro-batch has samples of one teacher only, and all
    ranks have those of the same teacher at a time. actors: for MicroBatch.actors.

    Each branch of a trajectory is a separate sequence, but its tokens have the weights of the whole trajectory. merged:
    what branches begin with together is computed once in a micro-batch, and counts once in its budget.
    """
    trained = [trained_tokens(sample, mask_truncated) for sample in samples]
    by_sample = objective.token_weights(trained, max_completion_tokens)
    by_teacher = teachers or [None] * len(samples)
    # One entry for each branch.
    rows: list[tuple[Sample, Branch]] = []
    weights: list[float] = []
    active: list[int] = []
    observed: list[int] = []
    taught: list[str | None] = []
    for sample, count, weight, teacher in zip(samples, trained, by_sample, by_teacher, strict=True):
        for branch in sample.branches:
            rows.append((sample, branch))
            weights.append(weight)
            sampled = sampled_tokens([branch])
            active.append(sampled if count else 0)
            given_behind = len(branch) - sampled - len(branch.segments[0].token_ids)
            observed.append(given_behind if active[-1] else 0)
            taught.append(teacher)
    # Tokens that the head computes something for.
    headed = active
    if observation_coefficient:
        headed = [sampled + written for sampled, written in zip(active, observed, strict=True)]
    hints = None
    if any(completion.hint_ids is not None for _, branch in rows for completion in branch.sampled):
        # The teacher's pack, whose prompts may be far longer, has to fit into the budget as well.
        hints = [teachers_tokens(branch) for _, branch in rows]
    bins: list[tuple[str | None, list[int]]] = []
    for teacher in dict.fromkeys(taught or [None]):
        indices = [i for i, name in enumerate(taught) if name == teacher]
        if merged:
            identified = [identities(rows[i][1], replayed) for i in indices]
            with_hints = None
            if hints is not None:
                with_hints = [hints[i] for i in indices]
            found = balanced_clusters(identified, [headed[i] for i in indices], budget, ranks, with_hints)
        else:
            sizes = [len(rows[i][1]) - 1 for i in indices]
            if hints is not None:
                sizes = [max(size, len(hints[i])) for size, i in zip(sizes, indices, strict=True)]
            found = balanced_bins(sizes, budget, ranks)
        bins += [(teacher, [indices[i] for i in members]) for members in found]
    if objective.local:
        # All micro-batches count the same, whatever they contain.
        for _, members in bins:
            token_weights = objective.token_weights([active[i] for i in members], max_completion_tokens)
            for i, weight in zip(members, token_weights, strict=True):
                weights[i] = weight / len(bins)
    settings = version, mask_truncated, device, replayed, merged, observation_coefficient / max(sum(observed), 1)
    packs: list[MicroBatch] = []
    for teacher, members in bins[rank::ranks]:
        packed_rows = [rows[i] for i in members]
        packs.append(pack(packed_rows, [weights[i] for i in members], *settings, teacher, actors))
    return packs
