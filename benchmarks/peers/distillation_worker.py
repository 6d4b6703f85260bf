"""One measurement of benchmarks/distillation_head.py in a process of its own: python distillation_worker.py TASK
'{options}'."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from head_worker import TRAINED_LOGIT_SCALE, error, reset_peak, resident

from torchtitan.models.head.divergence_head import KINDS, Comparison, TeacherStates, fused_divergence

# TRL's beta of each divergence.
BETAS = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}


class Case:
    """Hidden states and weights of a policy and of its teacher, whose logits are like those of the policy."""

    def __init__(
        self,
        vocab: int,
        hidden: int,
        tokens: int,
        dtype: torch.dtype = torch.float32,
        scale: float = TRAINED_LOGIT_SCALE,
    ):
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        states, weight = scale * draw(tokens, hidden), draw(vocab, hidden) / hidden**0.5
        self.teacher = TeacherStates(
            [(states + draw(tokens, hidden)).to(dtype)], [(weight + 0.1 * draw(vocab, hidden) / hidden**0.5).to(dtype)]
        )
        self.hidden, self.weight = (tensor.to(dtype).requires_grad_() for tensor in (states, weight))
        self.targets = torch.randint(0, vocab, (tokens,), generator=generator)

    def found(self, loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The loss and its gradients."""
        self.hidden.grad = self.weight.grad = None
        loss.backward()
        assert self.hidden.grad is not None and self.weight.grad is not None
        return loss.detach(), self.hidden.grad, self.weight.grad


def ours(case: Case, kind: str) -> torch.Tensor:
    comparison = Comparison(case.teacher, kind, BETAS[kind])
    return fused_divergence([case.hidden], [case.weight], case.targets, comparison, accumulate=True)[2].mean()


def trl(case: Case, kind: str) -> torch.Tensor:
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    loss: torch.Tensor = _chunked_divergence_loss(
        case.hidden[None],
        case.teacher.hidden[0][None],
        case.weight,
        case.teacher.weight[0],
        torch.ones(1, len(case.targets)),
        BETAS[kind],
    )[0]
    return loss


def full(case: Case, kind: str) -> torch.Tensor:
    p, q = (
        (hidden @ weight.t()).log_softmax(-1)
        for hidden, weight in ((case.hidden, case.weight), (case.teacher.hidden[0], case.teacher.weight[0]))
    )
    return KINDS[kind](p, q, BETAS[kind]).mean()


VARIANTS: dict[str, Callable[[Case, str], torch.Tensor]] = {"ours": ours, "trl": trl, "full": full}


def memory(options: dict[str, Any]) -> dict[str, Any]:
    """Peak in MiB above the inputs."""
    run, kind = VARIANTS[options["variant"]], options["kind"]
    # Libraries take their own buffers on first use.
    run(Case(512, options["hidden"], 32), kind).backward()
    case = Case(options["vocab"], options["hidden"], options["tokens"])
    base = reset_peak()
    run(case, kind).backward()
    return {"peak_mib": resident("VmHWM") - base}


def seconds(options: dict[str, Any]) -> dict[str, Any]:
    """Times of both, taking turns after one turn of few tokens that is not counted."""
    case = Case(options["vocab"], options["hidden"], options["tokens"])
    taken: dict[str, list[float]] = {"ours": [], "trl": []}
    processor: dict[str, list[float]] = {"ours": [], "trl": []}
    for name in taken:
        VARIANTS[name](Case(512, options["hidden"], 32), options["kind"]).backward()
    for turn in range(options["repeats"]):
        for name in list(taken)[:: 1 if turn % 2 == 0 else -1]:
            case.hidden.grad = case.weight.grad = None
            started_at, used = time.perf_counter(), time.process_time()
            VARIANTS[name](case, options["kind"]).backward()
            taken[name].append(time.perf_counter() - started_at)
            processor[name].append(time.process_time() - used)
    return {"seconds": taken, "processor": processor}


def accuracy(options: dict[str, Any]) -> dict[str, Any]:
    """Largest relative error of loss and gradients, of ours and TRL's against float64, and of ours against TRL's.

    Logits are of unit scale: the rounding of larger ones to fp32 hides everything else."""
    worst = dict.fromkeys(("fp32_error_ours", "fp32_error_trl", "difference_to_trl"), 0.0)
    shape = options["vocab"], options["hidden"], options["tokens"]
    for kind in BETAS:
        case, exact = (Case(*shape, dtype, 1.0) for dtype in (torch.float32, torch.float64))
        expected = exact.found(full(exact, kind))
        our_values, trl_values = (case.found(run(case, kind)) for run in (ours, trl))
        pairs = {"fp32_error_ours": (our_values, expected), "fp32_error_trl": (trl_values, expected)}
        pairs["difference_to_trl"] = (our_values, tuple(tensor.double() for tensor in trl_values))
        for name, (found, reference) in pairs.items():
            errors = [error(value, other) for value, other in zip(found, reference, strict=True)]
            worst[name] = max(worst[name], *errors)
    return worst


def main() -> None:
    torch.set_num_threads(1)
    tasks = {"memory": memory, "time": seconds, "accuracy": accuracy}
    print(json.dumps(tasks[sys.argv[1]](json.loads(sys.argv[2]))))


if __name__ == "__main__":
    main()
