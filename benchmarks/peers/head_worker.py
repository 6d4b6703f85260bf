"""One measurement of benchmarks/logprob_head.py in a process of its own: python head_worker.py TASK '{options}'."""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from head_variants import VARIANTS, Case, make_case, token_loss

from torchtitan.models.head.logprob_head import VocabularyPart, fused_log_probs

MIB = 1 << 20


def resident(key: str) -> float:
    """MiB of this process, now (VmRSS) or at most since reset_peak (VmHWM)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


def reset_peak() -> float:
    """Give back what is free, forget the highest level; returns the present one in MiB."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


# Logits of trained language models spread about so much.
TRAINED_LOGIT_SCALE = 4.0


def case_of(options: dict[str, Any], dtype: torch.dtype = torch.float32, trained: bool = False) -> Case:
    shape = options["vocab"], options["hidden"], options["tokens"], options["sequences"]
    return make_case(*shape, dtype, *((TRAINED_LOGIT_SCALE, True) if trained else ()))


def memory(options: dict[str, Any]) -> dict[str, Any]:
    """Peak above the inputs; above inputs and existing gradients for a later micro-batch."""
    run, case = VARIANTS[options["variant"]], case_of(options)
    # Libraries take their own buffers on first use.
    run(make_case(512, options["hidden"], 32, 2, torch.float32))
    for _ in range(options["accumulate"] - 1):
        run(case)
    base = reset_peak()
    run(case)
    return {"peak_mib": resident("VmHWM") - base}


def seconds(options: dict[str, Any]) -> dict[str, Any]:
    """Times of all variants, taking turns after one turn that is not counted."""
    case = case_of(options)
    taken: dict[str, list[float]] = {name: [] for name in options["variants"]}
    for turn in range(-1, options["repeats"]):
        for name in options["variants"][:: 1 if turn % 2 == 0 else -1]:
            case.hidden.grad = case.weight.grad = None
            started_at = time.perf_counter()
            VARIANTS[name](case)
            if turn >= 0:
                taken[name].append(time.perf_counter() - started_at)
    return {"seconds": taken}


def reference(case: Case, rounded: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss and gradients in float64 from the operands as they are, 64 tokens at a time.

    rounded: exact logits are rounded to float32, exact gradients to the operands' type, and nothing else: what is left
    to an implementation that makes no further error.
    """
    hidden, weight = (tensor.detach().double() for tensor in (case.hidden, case.weight))
    loss = torch.zeros((), dtype=torch.float64)
    hidden_gradient, weight_gradient = torch.zeros_like(hidden), torch.zeros_like(weight)
    for low in range(0, len(case.targets), 64):
        rows = slice(low, low + 64)
        logits = hidden[rows] @ weight.t()
        if rounded:
            logits = logits.float().double()
        log_probs = torch.log_softmax(logits, -1)
        chosen = log_probs.gather(-1, case.targets[rows, None]).squeeze(-1).requires_grad_()
        part = token_loss(chosen, case.old_log_probs[rows].double(), case.token_advantages[rows].double()).sum()
        part = part / len(case.targets)
        (slope,) = torch.autograd.grad(part, chosen)
        gradient = log_probs.exp().mul_(-slope[:, None])
        gradient.scatter_add_(-1, case.targets[rows, None], slope[:, None])
        hidden_gradient[rows] = gradient @ weight
        weight_gradient.addmm_(gradient.t(), hidden[rows])
        loss += part.detach()
    if rounded:
        return loss.float(), hidden_gradient.to(case.hidden.dtype), weight_gradient.to(case.weight.dtype)
    return loss, hidden_gradient, weight_gradient


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """‖difference‖ / ‖reference‖."""
    return ((found.double() - expected).norm() / expected.norm()).item()


def errors(name: str, case: Case, expected: tuple[torch.Tensor, ...]) -> tuple[float, float]:
    """Of a variant's loss, and the larger of its two gradients'."""
    case.hidden.grad = case.weight.grad = None
    loss = VARIANTS[name](case)
    assert case.hidden.grad is not None and case.weight.grad is not None
    return distances((loss, case.hidden.grad, case.weight.grad), expected)


def distances(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> tuple[float, float]:
    """Error of the loss, and the larger of the two gradients'."""
    loss, *gradients = (error(tensor, exact) for tensor, exact in zip(found, expected, strict=True))
    return loss, max(gradients)


def accuracy(options: dict[str, Any]) -> dict[str, Any]:
    """Against float64, fp32 and bf16 operands, two kinds of policy: an untrained one (logits of unit scale, any target)
    and one like a trained one that is on-policy (logits of scale 4, targets sampled from it).

    The two headline figures: rounding of fp32 sums shows in the first, rounding of logits to bf16 in the second, where
    logits are large and most gradients are small differences. Each is there for the other policy as well, and
    "rounding" is what a single rounding leaves.
    """
    ours = ("one_pass", "one_pass_small", "one_pass_entropy", "two_pass")
    figures: dict[str, float] = {}
    for policy in ("untrained", "trained"):
        for dtype in (torch.float32, torch.bfloat16):
            case = case_of(options, dtype, policy == "trained")
            expected = reference(case)
            found = {name: errors(name, case, expected) for name in (*ours, "liger", "full")}
            found["rounding"] = distances(reference(case, rounded=True), expected)
            for index, kind in enumerate(("loss", "gradient")):
                prefix = f"{policy}_{'fp32' if dtype == torch.float32 else 'bf16'}_{kind}_error"
                figures[f"{prefix}_ours"] = max(found[name][index] for name in ours)
                figures |= {f"{prefix}_{name}": found[name][index] for name in ("liger", "full", "rounding")}

    def fp32_error(policy: str) -> float:
        return max(figures[f"{policy}_fp32_{kind}_error_ours"] for kind in ("loss", "gradient"))

    def bf16_error_vs_liger(policy: str) -> float:
        return figures[f"{policy}_bf16_gradient_error_ours"] / figures[f"{policy}_bf16_gradient_error_liger"]

    return {
        "fp32_error": fp32_error("untrained"),
        "fp32_error_trained": fp32_error("trained"),
        "bf16_error_vs_liger": bf16_error_vs_liger("trained"),
        "bf16_error_vs_liger_untrained": bf16_error_vs_liger("untrained"),
        **figures,
    }


def tensor_parallel(options: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of the vocabulary; the error of what the ranks have together."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    case = case_of(options)
    parts = case.weight.detach().chunk(ranks)
    start = sum(len(part) for part in parts[:rank])
    shard = parts[rank].clone().requires_grad_()
    part = VocabularyPart(start, len(case.weight), len(parts[0]), dist.group.WORLD)
    warm = torch.randn(8, shard.shape[1])
    part = VocabularyPart(64 * rank, 64 * ranks, 64, dist.group.WORLD)
    fused_log_probs(warm, shard[:64].detach(), torch.zeros(8, dtype=torch.int64), vocabulary=part)
    whole = case.weight.detach().clone()
    case.weight = torch.nn.Parameter(torch.empty(0))
    base = reset_peak()
    log_probs, _ = fused_log_probs(case.hidden, shard, case.targets, vocabulary=part, entropy=False)
    loss = token_loss(log_probs, case.old_log_probs, case.token_advantages).sum() / len(case.targets)
    loss.backward()
    peak = resident("VmHWM") - base
    assert case.hidden.grad is not None and shard.grad is not None
    dist.all_reduce(case.hidden.grad)
    case.weight = whole
    expected = reference(case)
    worst = max(
        error(loss.detach(), expected[0]),
        error(case.hidden.grad, expected[1]),
        error(shard.grad, expected[2][start : start + len(shard)]),
    )
    result = {"peak_mib": peak, "error": worst}
    Path(options["output"]).write_text(json.dumps(result))
    return result


TASKS = {"memory": memory, "time": seconds, "accuracy": accuracy, "tensor_parallel": tensor_parallel}

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(TASKS[sys.argv[1]](json.loads(sys.argv[2]))))
