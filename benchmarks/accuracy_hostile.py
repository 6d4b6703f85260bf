"""How long the reward `accuracy` takes for completions that are made to be slow, and whether each gets its reward.

    python benchmarks/accuracy_hostile.py [--completions 10000] [--json] [--quick]

Completions are written by a seeded generator: boxes that are never closed, towers of powers, digits by the 100 kB,
braces in braces, unicode, LaTeX that asks for endless work. Each is judged by itself, in processor seconds of this
process and the children in which math-verify works. Then groups of eight go through the reward workers, as in a run.
"""

from __future__ import annotations

import asyncio
import random
import resource
import time
from collections.abc import Callable

import common

from torchtitan.config.job_config import JobConfig
from torchtitan.inference.types import Branch, Completion, Given, VersionSpan
from torchtitan.rollout.rewards.builtin_rewards import accuracy
from torchtitan.rollout.rewards.mathematics import checker
from torchtitan.rollout.rewards.reward_pool import RewardPool
from torchtitan.rollout.types import Prompt, Trajectory

BARS = {"accuracy_seconds_worst": ("<=", 1.5), "unscored": ("<=", 0), "unscored_in_groups": ("<=", 0)}
GOLDS = ("42", "-7.5", r"\frac{3}{4}", "50\\%", r"x^2+1", r"\sqrt{2}", "(1,2)", r"\{1,2,3\}", "[0,1)", "1,234")
GROUP = 8


def unclosed_boxes(rng: random.Random) -> str:
    return "so " + rng.choice((r"\boxed{", r"\boxed{4", r"\fbox{{", r"\boxed{\boxed{1}")) * rng.randint(100, 10_000)


def tower(rng: random.Random) -> str:
    height = rng.randint(3, 12)
    power = "^{".join(str(rng.randint(2, 99)) for _ in range(height)) + "}" * (height - 1)
    return rf"\boxed{{{rng.choice(('', '-', '1/', '2+'))}{power}}}"


def endless_work(rng: random.Random) -> str:
    large = rng.randint(6, 30)
    return rng.choice(
        (
            rf"\boxed{{{10**large}!}}",
            rf"\boxed{{\binom{{10^{{{large}}}}}{{{10**6}}}}}",
            rf"\boxed{{\sum_{{n=1}}^{{10^{{{large}}}}} \frac{{1}}{{n^2}}}}",
            rf"\boxed{{\int_0^1 x^{{x^{{{large}}}}} \sin(x^{{x}}) dx}}",
            rf"\boxed{{\sqrt[{large}]{{{10**large + 1}}}^{{{10**large}}}}}",
            rf"\boxed{{(x+y+z)^{{{100 * large}}}}}",
        )
    )


def digits(rng: random.Random) -> str:
    number = str(rng.randint(1, 9)) + "".join(rng.choices("0123456789", k=rng.choice((3_990, 5_000, 100_000))))
    form = rng.choice(
        ("{0}", r"\boxed{{{0}}}", "{0}.{0}", "{0}/{0}", "{0},{0}", "#### {0}", "1e{0}", r"\boxed{{1e{0}}}")
    )
    return form.format(number)


def groups_of_digits(rng: random.Random) -> str:
    return rng.choice(("1", r"\boxed{1")) + rng.choice((",234", r"\,234", "\u00a0234", ".5", "-3", "e5", "%")) * 20_000


def nested_braces(rng: random.Random) -> str:
    depth = rng.choice((10, 100, 1_900, 30_000))
    before, behind = rng.choice(
        (("{", "}"), (r"\frac{1}{", "}"), (r"\sqrt{", "}"), ("(", ")"), (r"\left(", r"\right)"))
    )
    return rf"\boxed{{{before * depth}1{behind * rng.choice((depth, depth - 1))}}}"


def unicode_noise(rng: random.Random) -> str:
    ranges = ((0x20, 0x2FF), (0x300, 0x36F), (0x590, 0x6FF), (0x2000, 0x2BFF), (0x4E00, 0x4FFF), (0x1F300, 0x1FAFF))
    text = "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(rng.choice((50, 3_000, 30_000))))
    return rng.choice((text, rf"\boxed{{{text}}}", rf"\boxed{{{text}", f"<think>{text}</think>{text}"))


def loop(rng: random.Random) -> str:
    part = rng.choice(("wait, ", r"\frac{1}{2}", r"\boxed{1} ", "<think>", "</think>", "#### ", "x + ", "1 + ", "= 2 "))
    return rng.choice(("", r"\boxed{")) + part * rng.choice((100, 600, 20_000)) + rng.choice(("", "}"))


# What takes a whole second of a processor is rare, so that all of them are judged in minutes.
KINDS: dict[Callable[[random.Random], str], float] = {
    unclosed_boxes: 20, tower: 2, endless_work: 2, digits: 20, groups_of_digits: 16, nested_braces: 8,
    unicode_noise: 16, loop: 16,
}  # fmt: skip


def processor_seconds() -> float:
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def judge_each(count: int, rng: random.Random) -> tuple[dict[str, float], int]:
    """The worst processor seconds of every kind and of all, the worst of the clock's, and how many got no reward."""
    worst: dict[str, float] = dict.fromkeys(["accuracy_seconds_worst", *(kind.__name__ for kind in KINDS)], 0.0)
    unscored, total, wall = 0, 0.0, 0.0
    for judged, kind in enumerate(rng.choices(list(KINDS), list(KINDS.values()), k=count), start=1):
        text, gold = kind(rng), rng.choice(GOLDS)
        used_before, clock = processor_seconds(), time.perf_counter()
        (reward,) = accuracy(completions=[text], answer=[gold])
        seconds = processor_seconds() - used_before
        wall = max(wall, time.perf_counter() - clock)
        unscored += reward is None
        total += seconds
        for name in ("accuracy_seconds_worst", kind.__name__):
            worst[name] = max(worst[name], seconds)
        if judged % 1000 == 0:
            worst_so_far = worst["accuracy_seconds_worst"]
            common.progress(f"{judged} judged, worst {worst_so_far:.2f} s, {unscored} without a reward")
    figures = {name if name == "accuracy_seconds_worst" else f"{name}_s": value for name, value in worst.items()}
    return figures | {"mean_s": total / count, "clock_worst_s": wall}, unscored


async def judge_groups(count: int, rng: random.Random) -> int:
    """How many of `count` groups' completions get no reward from the workers."""
    config = JobConfig()
    config.rewards.functions = ["accuracy"]
    pool = RewardPool(config)
    await pool.start()
    unscored = 0
    try:
        for number in range(count):
            # Every second group is of the slowest kinds alone.
            kinds = [tower, endless_work] if number % 2 else list(KINDS)
            texts = [rng.choice(kinds)(rng) for _ in range(GROUP)]
            completion = Completion([1], [0.0], "stop", [VersionSpan("e", 0, 0, 1)])
            group = [Trajectory([Branch([Given([1]), completion])], "stop", text) for text in texts]
            scores = await pool.score(Prompt(number, "?", [1], {"answer": rng.choice(GOLDS)}), group)
            unscored += sum(reward is None for reward, _ in scores)
    finally:
        await pool.close()
    return unscored


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--completions", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    count, groups = (40, 1) if arguments.quick else (arguments.completions, 20)
    rng = random.Random(arguments.seed)
    checker()  # no completion pays for loading math-verify
    figures, unscored = judge_each(count, rng)
    figures |= {"unscored": unscored, "unscored_in_groups": asyncio.run(judge_groups(groups, rng))}
    conditions = {
        "completions": count, "groups of eight": groups, "seed": arguments.seed, "quick": arguments.quick,
        "processor": common.processor(),
    }  # fmt: skip
    common.report("accuracy_hostile", figures, BARS, conditions, arguments.json)


if __name__ == "__main__":
    main()
