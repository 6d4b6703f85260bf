"""Memory and time of the fused log-prob head on a GPU against Liger 0.8.5, and against its matrix products alone.

    python benchmarks/logprob_head_gpu.py [--json] [--quick] [--budget-mb 1024]

Needs one NVIDIA GPU, and Liger (`pip install liger-kernel==0.8.5`) for two of the keys: they are absent without it.
Operands are bf16, the vocabulary has 151,936 tokens, the hidden size is 4096; 8,192 and 32,768 tokens in sequences of
512. Each key is the worse of the two token counts, whose own figures stand beside it:

- time_vs_liger: device time of the one-pass head, forward and backward ÷ Liger's, median over interleaved repeats.
- peak_vs_liger: peak of allocated memory above the inputs ÷ Liger's.
- time_vs_gemms: that time ÷ time of the three matrix products that every such head needs, in bf16 and nothing else.

Liger is run with torch.compile and without, as far as each works, and the better of the two counts.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import common
from benchmarks.peers.head_variants import Case, liger, make_case, one_pass, two_pass

BARS = {"time_vs_liger": ("<=", 0.6), "peak_vs_liger": ("<=", 0.5), "time_vs_gemms": ("<=", 2.0)}
SEQUENCE_TOKENS = 512

Work = Callable[[], object]


def own_ways(case: Case, budget: int) -> dict[str, Work]:
    """The head in the ways that are measured."""
    return {
        "one_pass": functools.partial(one_pass, case, entropy=False, budget=budget),
        "one_pass_entropy": functools.partial(one_pass, case, entropy=True, budget=budget),
        "two_pass": functools.partial(two_pass, case, budget=budget),
    }


def liger_ways(case: Case) -> tuple[dict[str, Work], str]:
    """Those of Liger's two ways that work here, and what to say about it."""
    ways: dict[str, Work] = {}
    failures = []
    for name, compiled in (("liger", False), ("liger_compiled", True)):
        try:
            liger(case, compiled=compiled)
        except ImportError as error:
            return {}, f"absent ({error}): no figures against it"
        except Exception as error:  # its torch.compile does not work with every version of torch
            failures.append(f"{name} does not work: {type(error).__name__}")
        else:
            ways[name] = functools.partial(liger, case, compiled=compiled)
    return ways, "; ".join([*ways, *failures])


def matrix_products(case: Case) -> Work:
    """Logits and the gradients of hidden states and weight, as if nothing were to be done between."""
    hidden, weight = case.hidden.detach(), case.weight.detach()
    logits = hidden.new_empty(len(hidden), len(weight))
    by_hidden, by_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def run() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight, out=by_hidden)
        torch.mm(logits.t(), hidden, out=by_weight)

    return run


def forget_gradients(case: Case) -> None:
    case.hidden.grad = case.weight.grad = None


def seconds(case: Case, work: Work) -> float:
    """Device seconds of one call that starts without gradients."""
    forget_gradients(case)
    if not case.hidden.is_cuda:
        return common.timed(work)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000


def peak_mib(case: Case, work: Work) -> float:
    """Of allocated memory, above what the inputs take."""
    forget_gradients(case)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / (1 << 20)


def compare(case: Case, budget: int, repeats: int) -> tuple[dict[str, float], str]:
    """Figures of one token count, and what is to be said about Liger."""
    peers, remark = liger_ways(case)
    ways = own_ways(case, budget) | peers
    figures: dict[str, float] = {}
    if case.hidden.is_cuda:
        figures |= {f"{name}_peak_mib": peak_mib(case, work) for name, work in ways.items()}
    ways["gemms"] = matrix_products(case)
    turns = {name: functools.partial(seconds, case, work) for name, work in ways.items()}
    taken = common.interleaved(turns, repeats, warm_up=2)
    figures |= {f"{name}_s": statistics.median(values) for name, values in taken.items()}
    figures["time_vs_gemms"] = common.median_ratio(taken["one_pass"], taken["gemms"])
    if peers:
        fastest = min(peers, key=lambda name: figures[f"{name}_s"])
        figures["time_vs_liger"] = common.median_ratio(taken["one_pass"], taken[fastest])
    if peers and case.hidden.is_cuda:
        figures["peak_vs_liger"] = figures["one_pass_peak_mib"] / min(figures[f"{name}_peak_mib"] for name in peers)
    return figures, remark


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--budget-mb", type=int, default=1024, help="memory for logits at a time")
    # Runs the same code on tiny operands, without figures of memory: to try it where there is no GPU.
    parser.add_argument("--cpu", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.cpu:
        common.refuse_without_gpu()
    where, small = "cpu" if options.cpu else "cuda", options.cpu or options.quick
    vocabulary, hidden, counts, repeats = (2048, 64, (1024, 2048), 3) if small else (151936, 4096, (8192, 32768), 11)
    by_count: dict[int, dict[str, float]] = {}
    remarks: dict[int, str] = {}
    for tokens in counts:
        common.progress(f"{tokens} tokens")
        case = make_case(vocabulary, hidden, tokens, tokens // SEQUENCE_TOKENS, torch.bfloat16, where=where)
        by_count[tokens], remarks[tokens] = compare(case, options.budget_mb << 20, repeats)
    measured = [key for key in BARS if all(key in found for found in by_count.values())]
    figures = {key: max(found[key] for found in by_count.values()) for key in measured}
    figures |= {f"{key}_{tokens}": value for tokens, found in by_count.items() for key, value in found.items()}
    conditions = {
        "gpu": "none" if options.cpu else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "liger": remarks,
        "vocab": vocabulary,
        "hidden": hidden,
        "tokens": list(counts),
        "sequence_tokens": SEQUENCE_TOKENS,
        "dtype": "bfloat16",
        "budget_mb": options.budget_mb,
        "repeats": repeats,
        "quick": options.quick,
    }
    common.report("logprob_head_gpu", figures, BARS, conditions, options.json)


if __name__ == "__main__":
    main()
