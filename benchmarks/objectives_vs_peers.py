"""Every objective and option that TRL 1.16 or Liger 0.8.5 has too: the same inputs, value and gradients compared.

    benchmarks/peers/setup.sh
    python benchmarks/objectives_vs_peers.py --json
    python benchmarks/objectives_vs_peers.py --markdown      a row for each setting (docs/algorithms.md)

The peers' own code runs in the environment of setup.sh (peers/objective_worker.py): TRL's GRPOTrainer on log-probs in
float64, where gradients are by log-probs and entropies; Liger's LigerFusedLinearGRPOLoss on hidden states and a weight
in fp32, which our head gets as well. Where definitions differ on purpose, the table says how far and why.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common
import torch

sys.path.insert(0, str(common.REPOSITORY))

from benchmarks.peers.objective_cases import (
    ADVANTAGES,
    AS_THEIRS,
    DIFFERENT,
    EQUAL,
    GENERATIONS,
    LONGEST,
    SAPO_TEMPERATURES_AS_THEIRS,
    AdvantageCase,
    Batch,
    Case,
)
from torchtitan.config.job_config import GRPO
from torchtitan.grpo.loss import FixedLogProbs, MicroBatchLoss, loss_settings
from torchtitan.inference.types import Branch, Completion, FinishReason, Given, VersionSpan
from torchtitan.models.head.logprob_head import fused_log_probs, fused_objective
from torchtitan.rollout.types import Sample
from torchtitan.trainer.packing import MicroBatch, micro_batches, trained_tokens

PEERS = common.REPOSITORY / "benchmarks" / "peers"
GROUPS = 4
VOCABULARY, HIDDEN = 64, 16
END = 1
TRL_BAR, FP32_BAR = 1e-12, 1e-5
TIMEOUT_SECONDS = 900


def make_batch(seed: int) -> Batch:
    """Random completions, padded [B, T]. Log-probs of the policy come from a head, so that Liger can compute them too.

    What an engine reports, and entropies, are rounded to fp32, since TRL rounds them; everything else is float64.
    """
    generator = torch.Generator().manual_seed(seed)
    count = GROUPS * GENERATIONS

    def near(values: torch.Tensor, spread: float) -> torch.Tensor:
        return values + spread * torch.randn(values.shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, LONGEST + 1, (count,), generator=generator)
    lengths[0] = LONGEST
    tokens = torch.randint(2, VOCABULARY, (count, LONGEST), generator=generator)
    ended = torch.rand(count, generator=generator) < 0.7
    tokens[torch.arange(count)[ended], lengths[ended] - 1] = END
    hidden = torch.randn(count, LONGEST, HIDDEN, generator=generator)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator) / 4
    distribution = (hidden.double() @ weight.double().t()).log_softmax(-1)
    now = distribution.gather(-1, tokens[..., None]).squeeze(-1)
    # Sequences drift as a whole as well, or their ratios would all be near 1.
    drift = near(torch.zeros(count, 1, dtype=torch.float64), 0.1)
    old = near(now, 0.15) + drift
    rewards = torch.rand(2, count, generator=generator).tolist()
    rewards[1] = [None if i % 5 == 3 else value for i, value in enumerate(rewards[1])]
    return {
        "tokens": tokens,
        "mask": (torch.arange(LONGEST) < lengths[:, None]).long(),
        "ended": ended.long(),
        "hidden": hidden,
        "weight": weight,
        "now": now,
        "old": old,
        "behaviour": near(old, 0.15).float().double(),
        "reference": near(now, 0.4),
        "entropy": -(distribution.exp() * distribution).sum(-1).float().double(),
        "advantages": near(torch.zeros(count, dtype=torch.float64), 1.0),
        "rewards": rewards,
        "generations": GENERATIONS,
        "longest": LONGEST,
    }


class Ours:
    """Loss and gradients of one case on one batch."""

    def __init__(self, case: Case, batch: Batch):
        ours = loss_settings(GRPO(**{**AS_THEIRS, **case.ours}))
        self.settings = replace(ours, options=replace(ours.options, sapo_temperatures=SAPO_TEMPERATURES_AS_THEIRS))
        self.case, self.batch = case, batch
        samples = [self._sample(number) for number in range(len(batch["tokens"]))]
        masked = bool(case.ours.get("mask_truncated"))
        lengths = [trained_tokens(sample, masked) for sample in samples]
        (packed,) = micro_batches(
            samples,
            self.settings.objective,
            version=0,
            budget=10_000,
            max_completion_tokens=LONGEST,
            mask_truncated=masked,
            rank=0,
            ranks=1,
            device=torch.device("cpu"),
        )
        # Where the micro-batch's tokens are in [B, T]: samples keep their order in one that holds all of them.
        self.places = batch["mask"].bool() & (torch.tensor(lengths) > 0)[:, None]
        weights = self.settings.objective.token_weights(lengths, LONGEST)
        self.exact = replace(
            packed,
            weights=self.rows(torch.tensor(weights, dtype=torch.float64)[:, None].expand(-1, LONGEST)),
            advantages=self.rows(batch["advantages"][:, None].expand(-1, LONGEST)),
            behaviour_log_probs=self.rows(batch["behaviour"]),
        )
        assert torch.equal(packed.targets, self.rows(batch["tokens"]))
        torch.testing.assert_close(packed.weights.double(), self.exact.weights)
        self.packed = packed

    def _sample(self, number: int) -> Sample:
        kept = self.batch["mask"][number].bool()
        tokens = self.batch["tokens"][number][kept].tolist()
        ended: FinishReason = "stop" if self.batch["ended"][number] else "length"
        log_probs = self.batch["behaviour"][number][kept].tolist()
        completion = Completion(tokens, log_probs, ended, [VersionSpan("e", 0, 0, len(tokens))])
        branch = Branch([Given([2]), completion])
        return Sample([branch], ended, 0.0, advantage=self.batch["advantages"][number].item())

    def rows(self, padded: torch.Tensor) -> torch.Tensor:
        """From [B, T, ...] to the active tokens."""
        return padded[self.places]

    def padded(self, rows: torch.Tensor) -> torch.Tensor:
        """The way back, flattened: tokens that are not trained have no gradient."""
        whole = rows.new_zeros(*self.places.shape, *rows.shape[1:])
        whole[self.places] = rows
        return whole.flatten()

    def loss_of(self, micro_batch: MicroBatch, dtype: torch.dtype) -> MicroBatchLoss:
        fixed, grpo = FixedLogProbs(), self.case.ours
        if self.case.decoupled:
            fixed.old = self.rows(self.batch["old"]).to(dtype)
        if grpo.get("kl_coefficient"):
            fixed.reference = self.rows(self.batch["reference"]).to(dtype)
        if "entropy_top_share" in grpo:
            # As PolicyTrainer does; here the proximal policy has the entropies of the current one, or TRL, which looks
            # at the latter, would choose other tokens.
            entropy = self.rows(self.batch["entropy"])
            threshold = entropy.sort().values[int((1 - grpo["entropy_top_share"]) * len(entropy))]
            fixed.trained = (entropy >= threshold).to(dtype)
        return MicroBatchLoss(micro_batch, fixed, self.settings)

    def in_float64(self) -> tuple[float, torch.Tensor]:
        """Loss, and its gradients by log-probs and by entropies."""
        leaves = now, entropy = [self.rows(self.batch[name]).clone().requires_grad_() for name in ("now", "entropy")]
        loss = self.loss_of(self.exact, torch.float64)(now, entropy, slice(0, len(now))).sum()
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        whole = [torch.zeros_like(leaves[0]) if gradient is None else gradient for gradient in gradients]
        return loss.item(), torch.cat([self.padded(gradient) for gradient in whole])

    def through_the_head(self) -> tuple[float, torch.Tensor]:
        """Loss, and its gradients by hidden states and weight, in fp32 as in a run."""
        leaves = [
            self.rows(self.batch["hidden"]).clone().requires_grad_(),
            self.batch["weight"].clone().requires_grad_(),
        ]
        loss_of = self.loss_of(self.packed, torch.float32)
        targets, everything = self.packed.targets, slice(0, len(self.packed.targets))
        if loss_of.separable:
            loss, _, _ = fused_objective(*leaves, targets, loss_of)
        else:
            loss = loss_of(*fused_log_probs(*leaves, targets), everything).sum()
        by_hidden, by_weight = torch.autograd.grad(loss, leaves)
        return loss.item(), torch.cat([self.padded(by_hidden), by_weight.flatten()])


@dataclass
class Row:
    """One case: how far apart values are, and gradients relative to the peer's; None where a peer does not have it."""

    name: str
    reason: str
    trl_value: float = 0.0
    trl_gradient: float = 0.0
    liger_value: float | None = None
    liger_gradient: float | None = None
    constant_apart: float = 0.0
    """What is left of trl_gradient when ours is multiplied by the best constant"""

    def add(self, peer: str, value: float, ours: torch.Tensor, reference: torch.Tensor) -> None:
        """Keep the largest differences."""
        setattr(self, f"{peer}_value", max(getattr(self, f"{peer}_value") or 0.0, value))
        apart = relative(ours, reference)
        setattr(self, f"{peer}_gradient", max(getattr(self, f"{peer}_gradient") or 0.0, apart))
        if peer == "trl":
            best = (ours @ reference) / (ours @ ours)
            self.constant_apart = max(self.constant_apart, relative(best * ours, reference))


def compare(case: Case, batches: list[Batch], found: list[dict[str, Any]]) -> Row:
    """The largest differences over the batches."""
    row = Row(case.name, case.reason)
    for batch, peers in zip(batches, found, strict=True):
        ours = Ours(case, batch)
        value, gradients = ours.in_float64()
        expected = torch.cat([peers["trl"][name].flatten() for name in ("by_log_prob", "by_entropy")])
        row.add("trl", abs(case.scale * value - peers["trl"]["loss"]), case.scale * gradients, expected)
        if "liger" in peers:
            value, gradients = ours.through_the_head()
            expected = torch.cat([peers["liger"][name].flatten() for name in ("by_hidden", "by_weight")])
            row.add("liger", abs(case.scale * value - peers["liger"]["loss"]), case.scale * gradients, expected)
    return row


def compare_advantages(case: AdvantageCase, batches: list[Batch], found: list[dict[str, Any]]) -> Row:
    """The advantages stand in the columns of the gradients; TRL makes them in fp32."""
    row = Row(case.name, case.reason)
    for batch, peers in zip(batches, found, strict=True):
        ours, expected = case.advantages(batch), peers["trl"]["advantages"].double()
        row.add("trl", (ours - expected).abs().max().item(), ours, expected)
    return row


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """‖found − expected‖ / ‖expected‖"""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def ask_peers(cases: Sequence[Case | AdvantageCase], batches: list[Batch]) -> list[list[dict[str, Any]]]:
    """What the peers say, per case and batch."""
    with tempfile.TemporaryDirectory() as folder:
        inputs, outputs = Path(folder) / "inputs.pt", Path(folder) / "outputs.pt"
        torch.save({"cases": [case.for_peers() for case in cases], "batches": batches}, inputs)
        common.run([common.peers_python(), PEERS / "objective_worker.py", inputs, outputs], TIMEOUT_SECONDS)
        found: list[dict[str, Any]] = torch.load(outputs, weights_only=True)
    return [found[i : i + len(batches)] for i in range(0, len(found), len(batches))]


def number(value: float | None) -> str:
    return "–" if value is None else "0" if value == 0 else f"{value:.1e}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool) -> str:
    """For a page or for a terminal."""
    if markdown:
        return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in [head, *rows]
    )


def show(equal: list[Row], advantages: list[Row], different: list[Row], markdown: bool) -> None:
    lines = [
        [row.name, number(row.trl_value), number(row.trl_gradient), number(row.liger_value), number(row.liger_gradient)]
        for row in equal
    ]
    print(table(["objective", "TRL: value", "TRL: gradients", "Liger: value", "Liger: gradients"], lines, markdown))
    lines = [[row.name, number(row.trl_value), number(row.trl_gradient)] for row in advantages]
    print("\n" + table(["advantages", "TRL: largest difference", "TRL: relative"], lines, markdown))
    lines = [[row.name, number(row.trl_gradient), number(row.constant_apart), row.reason] for row in different]
    head = ["differs on purpose", "TRL: relative", "but for a constant", "reason"]
    print("\n" + table(head, lines, markdown) + "\n")


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--markdown", action="store_true", help="a row for each setting (docs/algorithms.md)")
    parser.add_argument("--batches", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    batches = [make_batch(seed) for seed in range(1 if arguments.quick else arguments.batches)]
    cases = [*EQUAL, *DIFFERENT]
    found = ask_peers([*cases, *ADVANTAGES], batches)
    rows = [compare(case, batches, part) for case, part in zip(cases, found, strict=False)]
    made = [compare_advantages(case, batches, part) for case, part in zip(ADVANTAGES, found[len(cases) :], strict=True)]
    equal = [row for row in rows if not row.reason]
    advantages = [row for row in made if not row.reason]
    different = [row for row in [*rows, *made] if row.reason]
    show(equal, advantages, different, arguments.markdown)
    if arguments.markdown:
        return
    figures = {
        "trl_value_difference": max(row.trl_value for row in equal),
        "trl_gradient_difference": max(row.trl_gradient for row in equal),
        "liger_value_difference": max(row.liger_value for row in equal if row.liger_value is not None),
        "liger_gradient_difference": max(row.liger_gradient for row in equal if row.liger_gradient is not None),
        "advantage_difference": max(row.trl_gradient for row in advantages),
        "objectives": len(equal),
        "objectives_of_liger": sum(row.liger_value is not None for row in equal),
    }
    bars = {
        "trl_value_difference": ("<=", TRL_BAR),
        "trl_gradient_difference": ("<=", TRL_BAR),
        "liger_value_difference": ("<=", FP32_BAR),
        "liger_gradient_difference": ("<=", FP32_BAR),
        "advantage_difference": ("<=", FP32_BAR),
    }
    conditions = {"batches": len(batches), "completions": GROUPS * GENERATIONS, "longest": LONGEST}
    common.report("objectives_vs_peers", figures, bars, conditions, arguments.json)


if __name__ == "__main__":
    main()
