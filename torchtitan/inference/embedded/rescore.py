"""Log-probs of finished completions with the trainer's own forward."""

from __future__ import annotations

import torch

from torchtitan.inference.types import Completion
from torchtitan.models.attention import PackedLayout
from torchtitan.models.decoder import Decoder
from torchtitan.models.expert_args import MISSING
from torchtitan.models.fused_projections import separate_projections
from torchtitan.models.kept_tokens import KeptTokens

MOST_TOKENS = 8192

Scored = tuple[list[int], Completion, float]


@torch.inference_mode()
def rescore(policy: Decoder, finished: list[Scored]) -> None:
    """Overwrite the log-probs of completions (prompt, completion, sampling temperature) with the trainer's."""
    by_temperature: dict[float, list[Scored]] = {}
    for scored in finished:
        by_temperature.setdefault(scored[2] or 1.0, []).append(scored)
    with separate_projections(policy):
        for temperature, group in by_temperature.items():
            pack: list[Scored] = []
            total = 0
            for scored in group:
                length = len(scored[0]) + len(scored[1].token_ids)
                if pack and total + length > MOST_TOKENS:
                    _rescore_pack(policy, pack, temperature)
                    pack, total = [], 0
                pack.append(scored)
                total += length
            _rescore_pack(policy, pack, temperature)


def score(policy: Decoder, token_ids: list[int]) -> list[float]:
    """Log-probs at temperature 1 of all tokens but the first."""
    rest = Completion(token_ids[1:], [0.0] * (len(token_ids) - 1), "length", [])
    rescore(policy, [(token_ids[:1], rest, 1.0)])
    return rest.log_probs


def _rescore_pack(policy: Decoder, pack: list[Scored], temperature: float) -> None:
    token_ids: list[int] = []
    targets: list[int] = []
    kept: list[list[int]] = []
    lengths: list[int] = []
    places: list[slice] = []
    for prompt, completion, _ in pack:
        sequence = prompt + completion.token_ids
        # Position t predicts token t + 1; the last predicts nothing.
        begin = len(token_ids) + len(prompt) - 1
        places.append(slice(begin, begin + len(completion.token_ids)))
        token_ids += sequence
        targets += [*sequence[1:], 0]
        lengths.append(len(sequence))
        kept += [[]] * (len(prompt) - 1)
        kept += completion.kept_token_ids or [[]] * len(completion.token_ids)
        kept.append([])
    device = policy.lm_head.weight.device
    log_probs, _ = policy(
        torch.tensor(token_ids, device=device),
        PackedLayout(lengths, device),
        torch.tensor(targets, device=device),
        temperature,
        KeptTokens.from_rows(kept, device),
        routes=_routes([completion for _, completion, _ in pack], lengths, device),
    )
    values = log_probs.cpu()
    for (_, completion, _), place in zip(pack, places, strict=True):
        completion.log_probs = values[place].tolist()


def _routes(completions: list[Completion], lengths: list[int], device: torch.device) -> torch.Tensor | None:
    """[T, layers, k]: the experts that the tokens were sampled with, as the trainer will have them."""
    told = [one.routes for one in completions if one.routes is not None]
    if not told:
        return None
    rows = torch.full((sum(lengths), *told[0].experts.shape[1:]), MISSING, dtype=torch.int16)
    for one, place in zip(completions, rows.split(lengths), strict=True):
        if one.routes is not None:
            known = torch.from_numpy(one.routes.experts.astype("int16"))
            place[one.routes.first : one.routes.first + len(known)] = known
    return rows.to(device)
