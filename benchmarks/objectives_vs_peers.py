"""Every objective and option that TRL 1.16 or Liger 0.8.5 has too: the same inputs, value and gradients compared.

    benchmarks/peers/setup.sh
    python benchmarks/objectives_vs_peers.py --json
    python benchmarks/objectives_vs_peers.py --markdown      the table of docs/algorithms.md

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
import numpy as np
import torch

sys.path.insert(0, str(common.REPOSITORY))

from torchtitan.config.job_config import GRPO
from torchtitan.grpo.advantages import group_advantages, normalized_each
from torchtitan.grpo.loss import FixedLogProbs, MicroBatchLoss
from torchtitan.grpo.loss_settings import loss_settings
from torchtitan.inference.trajectory import Branch, Given
from torchtitan.inference.types import Completion, FinishReason, VersionSpan
from torchtitan.models.logprob_head import fused_log_probs, fused_objective
from torchtitan.rollout.types import Sample
from torchtitan.trainer.packing import MicroBatch, micro_batches, trained_tokens

PEERS = common.REPOSITORY / "benchmarks" / "peers"
GROUPS, GENERATIONS, LONGEST = 4, 4, 9
VOCABULARY, HIDDEN = 64, 16
END = 1
TRL_BAR, FP32_BAR = 1e-12, 1e-5
TIMEOUT_SECONDS = 900

Batch = dict[str, Any]


CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}
# Ours differs by default: a range for gspo by its paper, a bound of the ratio where the advantage is negative. TRL's
# torch.where rounds sapo's 1.05 to single precision, whatever the ratios are in.
AS_THEIRS = {
    "epsilon_low": 0.2,
    "epsilon_high": 0.28,
    "delta": 0.0,
    "sapo_temperature_negative": float(np.float32(1.05)),
}
SEQUENCE = {"importance_sampling_level": "sequence"}
DECOUPLED = {"recompute_old_log_probs": True}
# TRL's name of an option that Liger has too -> Liger's.
LIGER_NAMES = {"epsilon": "epsilon_low"} | {
    name: name
    for name in (
        "loss_type",
        "epsilon_high",
        "delta",
        "beta",
        "importance_sampling_level",
        "sapo_temperature_pos",
        "sapo_temperature_neg",
        "use_bias_correction_kl",
    )
}


class Case:
    """Settings of our [grpo] table and what TRL and Liger call the same."""

    def __init__(
        self,
        name: str,
        ours: dict[str, Any],
        theirs: dict[str, Any] | None = None,
        *,
        liger: bool = True,
        scale: float = 1.0,
        reason: str = "",
    ):
        """theirs: options of GRPOConfig; without a loss_type they have ours. liger: False where Liger cannot do it.
        scale: ours times this is theirs. reason: why definitions differ, where they do."""
        self.name, self.ours, self.scale, self.reason = name, ours, scale, reason
        # TRL corrects its KL term by default.
        self.trl = {"loss_type": ours["loss_type"], "use_bias_correction_kl": False, **CLIP, **(theirs or {})}
        self.liger = {LIGER_NAMES[key]: value for key, value in self.trl.items() if key in LIGER_NAMES}
        self.has_liger = liger
        self.decoupled = bool(ours.get("recompute_old_log_probs"))

    def for_peers(self) -> dict[str, Any]:
        liger = self.liger if self.has_liger else None
        return {"trl": self.trl, "liger": liger, "decoupled": self.decoupled, "rloo": False}


def of_sequences(loss_type: str, liger: bool = True, **ours: Any) -> Case:
    """One ratio per sequence under another objective than gspo."""
    name = f'{loss_type}, importance_level = "sequence"'
    theirs = dict(SEQUENCE)
    if loss_type == "cispo":
        theirs["epsilon_high"] = ours["cispo_cap"]
    return Case(name, {"loss_type": loss_type, "importance_level": "sequence", **ours}, theirs, liger=liger)


def corrected(name: str, mode: str, low: float | None, high: float, **ours: Any) -> Case:
    """Decoupled mode with an off-policy correction. The ratio that Liger is given is the one that TRL computes."""
    theirs = {"mode": mode, "clip_min": low, "clip_max": high}
    return Case(
        f"dapo, {name}",
        {"loss_type": "dapo", **DECOUPLED, **ours},
        {f"vllm_importance_sampling_{key}": value for key, value in theirs.items()},
    )


EQUAL = [
    *(Case(name, {"loss_type": name}) for name in ("dapo", "grpo")),
    Case("bnpo, one micro-batch", {"loss_type": "bnpo"}),
    Case("dr_grpo", {"loss_type": "dr_grpo"}),
    Case("gspo", {"loss_type": "gspo"}, {"loss_type": "grpo", **SEQUENCE}),
    Case("cispo, cispo_cap = 1.15", {"loss_type": "cispo", "cispo_cap": 1.15}, {"epsilon_high": 1.15}),
    Case("sapo", {"loss_type": "sapo"}),
    Case(
        "sapo, temperatures 2 and 3",
        {"loss_type": "sapo", "sapo_temperature_positive": 2.0, "sapo_temperature_negative": 3.0},
        {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
    ),
    Case(
        "reinforce, importance_cap = 1.1 (theirs: cispo)",
        {"loss_type": "reinforce", "importance_cap": 1.1},
        {"loss_type": "cispo", "epsilon_high": 1.1},
    ),
    *(of_sequences(name) for name in ("dapo", "bnpo", "dr_grpo")),
    of_sequences("sapo", liger=False),
    of_sequences("cispo", liger=False, cispo_cap=1.02),
    Case(
        "their luspo: importance_level = sequence, loss_normalization = constant, × longest completion",
        {"loss_type": "dapo", "importance_level": "sequence", "loss_normalization": "constant"},
        {"loss_type": "luspo", **SEQUENCE},
        scale=LONGEST,
    ),
    Case(
        "dapo, clip range 0.1 / 0.3",
        {"loss_type": "dapo", "epsilon_low": 0.1, "epsilon_high": 0.3},
        {"epsilon": 0.1, "epsilon_high": 0.3},
    ),
    Case("dapo, delta = 1.3", {"loss_type": "dapo", "delta": 1.3}, {"delta": 1.3}),
    Case("grpo, delta = 1.3", {"loss_type": "grpo", "delta": 1.3}, {"delta": 1.3}),
    Case("gspo, delta = 1.05", {"loss_type": "gspo", "delta": 1.05}, {"loss_type": "grpo", "delta": 1.05, **SEQUENCE}),
    *(
        Case(
            f"{name}, kl_coefficient = 0.1",
            {"loss_type": name, "kl_coefficient": 0.1, "kl_ratio_correction": False},
            {"beta": 0.1},
        )
        for name in ("dapo", "grpo", "dr_grpo", "sapo")
    ),
    Case(
        "gspo, kl_coefficient = 0.1",
        {"loss_type": "gspo", "kl_coefficient": 0.1, "kl_ratio_correction": False},
        {"loss_type": "grpo", "beta": 0.1, **SEQUENCE},
    ),
    Case(
        "dapo, kl_coefficient = 0.1, kl_ratio_correction",
        {"loss_type": "dapo", "kl_coefficient": 0.1, "kl_ratio_correction": True},
        {"beta": 0.1, "use_bias_correction_kl": True},
    ),
    Case(
        "dapo, entropy_coefficient = 0.05",
        {"loss_type": "dapo", "entropy_coefficient": 0.05},
        {"entropy_coef": 0.05},
        liger=False,
    ),
    *(
        Case(
            f"{name}, mask_truncated", {"loss_type": name, "mask_truncated": True}, {"mask_truncated_completions": True}
        )
        for name in ("dapo", "dr_grpo")
    ),
    Case(
        "dapo, negative_mask_threshold = 0.01",
        {"loss_type": "dapo", "negative_mask_threshold": 0.01},
        {"off_policy_mask_threshold": 0.01},
        liger=False,
    ),
    Case(
        "dapo, entropy_top_share = 0.5, kl_coefficient = 0.1, decoupled",
        {
            "loss_type": "dapo",
            **DECOUPLED,
            "off_policy_correction": "none",
            "entropy_top_share": 0.5,
            "kl_coefficient": 0.1,
            "kl_ratio_correction": False,
        },
        {"vllm_importance_sampling_correction": False, "top_entropy_quantile": 0.5, "beta": 0.1},
        liger=False,
    ),
    Case(
        "dapo, no correction, decoupled",
        {"loss_type": "dapo", **DECOUPLED, "off_policy_correction": "none"},
        {"vllm_importance_sampling_correction": False},
    ),
    corrected("truncate, importance_cap = 1.1", "token_truncate", None, 1.1, importance_cap=1.1),
    corrected("mask, importance_cap = 1.1", "token_mask", None, 1.1, off_policy_correction="mask", importance_cap=1.1),
    corrected(
        "icepop 0.9 to 1.2",
        "token_mask",
        0.9,
        1.2,
        off_policy_correction="icepop",
        icepop_low=0.9,
        icepop_high=1.2,
    ),
]

DIFFERENT = [
    Case(
        "grpo, mask_truncated",
        {"loss_type": "grpo", "mask_truncated": True},
        {"mask_truncated_completions": True},
        reason="Theirs divides by all completions, ours by those that are trained: masking must not shrink the step. "
        "The two differ by that factor alone.",
    ),
    Case(
        "grpo, entropy_coefficient = 0.05",
        {"loss_type": "grpo", "entropy_coefficient": 0.05},
        {"entropy_coef": 0.05},
        liger=False,
        reason="Theirs is a mean over the micro-batch's tokens, which depends on how a batch is cut; ours has the "
        "token weights of the objective. Equal for dapo on one micro-batch.",
    ),
    Case(
        "gspo, kl_coefficient = 0.1, kl_ratio_correction",
        {"loss_type": "gspo", "kl_coefficient": 0.1, "kl_ratio_correction": True},
        {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True, **SEQUENCE},
        reason="Theirs multiplies a token's KL by its sequence's ratio, ours by its own, without which it is not "
        "unbiased.",
    ),
    Case(
        "dapo, negative_mask_threshold = 0.01, decoupled",
        {"loss_type": "dapo", **DECOUPLED, "off_policy_correction": "none", "negative_mask_threshold": 0.01},
        {"vllm_importance_sampling_correction": False, "off_policy_mask_threshold": 0.01},
        liger=False,
        reason="Theirs looks at π/μ in every optimizer step, ours at π_old/μ: known before the forward, so that one "
        "pass is enough; what π does after that the clip bounds.",
    ),
    corrected(
        "product mask up to 1.5 (theirs: sequence_mask)",
        "sequence_mask",
        None,
        1.5,
        off_policy_correction="truncate",
        importance_cap=1e9,
        product_mask_high=1.5,
    ),
]
DIFFERENT[-1].reason = (
    "Both leave out sequences whose ratios multiply to more than the bound; theirs then weights every token by that "
    "product, ours by the token's own ratio: the product of a long answer is mostly noise."
)


@dataclass
class AdvantageCase:
    """Advantages of two reward functions with the weights 1 and 0.5, of which the second says None to some samples."""

    name: str
    ours: dict[str, str]
    """Arguments of group_advantages or normalized_each"""
    trl: dict[str, Any]
    each: bool = False
    rloo: bool = False
    reason: str = ""

    def for_peers(self) -> dict[str, Any]:
        trl = {"reward_weights": [1.0, 0.5], **self.trl}
        return {"trl": trl, "liger": None, "decoupled": False, "rloo": self.rloo}

    def advantages(self, batch: Batch) -> torch.Tensor:
        samples = [{"a": a, "b": b} for a, b in zip(*batch["rewards"], strict=True)]
        groups = [samples[i : i + GENERATIONS] for i in range(0, len(samples), GENERATIONS)]
        if self.each:
            values = normalized_each(groups, {"a": 1.0, "b": 0.5}, **self.ours)
        else:
            sums = [[one["a"] + 0.5 * (one["b"] or 0.0) for one in group] for group in groups]
            values = group_advantages(sums, **self.ours)
        return torch.tensor(values, dtype=torch.float64).flatten()


ADVANTAGES = [
    AdvantageCase('advantage = "group"', {}, {}),
    AdvantageCase('advantage = "rloo" (theirs: RLOOTrainer)', {"estimator": "rloo"}, {"beta": 0.0}, rloo=True),
    AdvantageCase('scale_rewards = "group"', {"scale_rewards": "group"}, {"scale_rewards": "group"}),
    AdvantageCase('scale_rewards = "batch"', {"scale_rewards": "batch"}, {"scale_rewards": "batch"}),
    AdvantageCase(
        'reward_aggregation = "normalize_each", scale_rewards = "group"',
        {"scale_rewards": "group"},
        {"multi_objective_aggregation": "normalize_then_sum"},
        each=True,
    ),
]


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
        self.settings = loss_settings(GRPO(**{**AS_THEIRS, **case.ours}))
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
        leaves = [self.rows(self.batch[name]).clone().requires_grad_() for name in ("now", "entropy")]
        loss = self.loss_of(self.exact, torch.float64)(*leaves, slice(0, len(leaves[0]))).sum()
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

    def add(self, peer: str, value: float, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """Keep the largest differences."""
        setattr(self, f"{peer}_value", max(getattr(self, f"{peer}_value") or 0.0, value))
        apart = relative(ours, theirs)
        setattr(self, f"{peer}_gradient", max(getattr(self, f"{peer}_gradient") or 0.0, apart))
        if peer == "trl":
            best = (ours @ theirs) / (ours @ ours)
            self.constant_apart = max(self.constant_apart, relative(best * ours, theirs))


def compare(case: Case, batches: list[Batch], found: list[dict[str, Any]]) -> Row:
    """The largest differences over the batches."""
    row = Row(case.name, case.reason)
    for batch, theirs in zip(batches, found, strict=True):
        ours = Ours(case, batch)
        value, gradients = ours.in_float64()
        expected = torch.cat([theirs["trl"][name].flatten() for name in ("by_log_prob", "by_entropy")])
        row.add("trl", abs(case.scale * value - theirs["trl"]["loss"]), case.scale * gradients, expected)
        if "liger" in theirs:
            value, gradients = ours.through_the_head()
            expected = torch.cat([theirs["liger"][name].flatten() for name in ("by_hidden", "by_weight")])
            row.add("liger", abs(case.scale * value - theirs["liger"]["loss"]), case.scale * gradients, expected)
    return row


def compare_advantages(case: AdvantageCase, batches: list[Batch], found: list[dict[str, Any]]) -> Row:
    """The advantages stand in the columns of the gradients; TRL makes them in fp32."""
    row = Row(case.name, case.reason)
    for batch, theirs in zip(batches, found, strict=True):
        ours, expected = case.advantages(batch), theirs["trl"]["advantages"].double()
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
    parser.add_argument("--markdown", action="store_true", help="tables as in docs/algorithms.md")
    parser.add_argument("--batches", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    batches = [make_batch(seed) for seed in range(1 if arguments.quick else arguments.batches)]
    cases = [*EQUAL, *DIFFERENT]
    found = ask_peers([*cases, *ADVANTAGES], batches)
    rows = [compare(case, batches, one) for case, one in zip(cases, found, strict=False)]
    made = [compare_advantages(case, batches, one) for case, one in zip(ADVANTAGES, found[len(cases) :], strict=True)]
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
