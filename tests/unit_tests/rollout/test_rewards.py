"""Built-in reward functions against cases worked out by hand."""

from __future__ import annotations

import math
import resource
import time
from typing import Any

import pytest

from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.rollout.rewards import BUILTIN, NEEDS_ANSWER, load_reward

# Rows of GSM8K's training file, as they stand there (MIT licence, see shared/data/gsm8k_LICENSE).
GSM8K = [
    (
        "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = <<48+24=72>>72 clips altogether in "
        "April and May.\n#### 72",
        "72",
    ),
    (
        "Weng earns 12/60 = $<<12/60=0.2>>0.2 per minute.\nWorking 50 minutes, she earned 0.2 x 50 = "
        "$<<0.2*50=10>>10.\n#### 10",
        "10",
    ),
    ("…and so the house sold for 3,000 * 20 = $60,000.\n#### 60,000", "60000"),
]


def call(name: str, completions: list[Any], **arguments: Any) -> list[float | None]:
    count = len(completions)
    defaults: dict[str, Any] = {
        "prompts": [""] * count, "completion_ids": [[0]] * count, "finish_reasons": ["stop"] * count,
        "max_completion_tokens": 10, "another_column": [1] * count,
    }  # fmt: skip
    return load_reward(name)(completions=completions, **{**defaults, **arguments})


@pytest.mark.parametrize(
    ("completion", "gold", "reward"),
    [
        (r"thus \boxed{72}", "72", 1.0), (r"\boxed{71} is wrong, \boxed{72} right", "72", 1.0),
        (r"\boxed{72} because 3 + 4 = 7", "72", 1.0), ("The answer is 72.", "72", 1.0),
        ("First 72, then 73", "72", 0.0), ("It costs $1,234.50!", "1234.5", 1.0), ("we get 10-3", "7", 1.0),
        ("x = -3", "-3", 1.0), ("x = -3", "3", 0.0), ("a half is 0.5", r"\frac{1}{2}", 1.0),
        (r"\boxed{\frac{2}{4}}", "0.5", 1.0), (r"\boxed{1+x^2}", "x^2+1", 1.0), (r"\boxed{1+x^2}", "$x^3+1$", 0.0),
        (r"\boxed{2^{1/2}}", r"\sqrt{2}", 1.0), (r"<think>\boxed{5}</think> \boxed{6}", "6", 1.0),
        (r"<think>\boxed{5}</think> \boxed{6}", "5", 0.0), ("no number", "72", 0.0), (r"\boxed{7", "7", 1.0),
        ("72", "hello world", 0.0), ("72", "x^2 +", None), ("72", "", None), ("72", None, None), ("72", ["72"], 1.0),
        (r"\boxed{72}", [72], 1.0), ("72", ["$71$"], 0.0), ("72", ["72", "73"], None), ("72", [["72"]], None),
        ("72", "72 square feet", 1.0), (r"\boxed{50}", r"50\%", 1.0),
        # Found by reviews.
        (r"\boxed{0.5}", r"50\%", 1.0), (r"\boxed{50\%}", "0.5", 1.0), (r"\boxed{50\%}", "50", 1.0),
        (r"\boxed{50\%}", r"50\%", 1.0), (r"\boxed{50\%}", r"0.5\%", 0.0), (r"\boxed{5\%}", "0.5", 0.0),
        ("That is 50%.", "0.5", 1.0), (r"\boxed{10\%}", r"\frac{1}{10}", 1.0),
        (r"\boxed{50\text{ percent}}", "0.5", 1.0), (r"\boxed{18 dollars}", "18", 1.0),
        (r"\boxed{\$18}", "18 dollars", 1.0), (r"\boxed{18 million}", "18", 0.0), (r"\boxed{2xy}", "2", 0.0),
        (r"\boxed{1\,234}", "1234", 1.0), (r"\boxed{10,\!000}", "10000", 1.0),
        (r"so 1\,234\,567 in all", "1,234,567", 1.0), (r"\boxed{1,234}", "1234", 1.0), (r"\boxed{1e5}", "100000", 1.0),
        (r"\boxed{1e5}", "100,000", 1.0), ("It is 6.02e23", "6.02e23", 1.0), ("1e-3", "0.001", 1.0),
        (r"\boxed{1e999999999}", "1", 0.0), ("<think>the answer is \\boxed{7}", "7", 0.0), ("<think>it is 7", "7", 0.0),
        ("7 <think>or \\boxed{8}", "7", 1.0), (r"\boxed{\{1,2\}}", r"\{2,1\}", 1.0), (r"\boxed{5}\boxed{", "5", 1.0),
        (r"\boxed{\boxed{5}", "5", 1.0), (r"\boxed{a \{ b} \boxed{6", "6", 0.0),
        (r"\boxed{4 divided by two}", "4", 0.0), (r"\boxed{1}", "1 1/2", 0.0), ("\u00b2", "2", 0.0),
        ("2024-01-05", "5", 0.0),
    ],
)  # fmt: skip
def test_accuracy(completion: str, gold: Any, reward: float | None) -> None:
    assert call("accuracy", [completion], answer=[gold]) == [reward]


@pytest.mark.parametrize(
    ("completion", "right", "wrong"),
    [
        # Without a box: formulas, roots, powers and units are no plain last number.
        (r"the answer is $\frac{3}{4}$", "3/4", "4"), ("so 5 m^2", "5", "2"), (r"it is \sqrt{3}", r"\sqrt{3}", "3"),
        ("It is 2^10", "1024", "10"), ("3 \\pi", r"3\pi", "3"), ("at 10:30", "10:30", "30"),
        ("1.5 × 10^3", "1500", "3"), ("so $x = 7$", "7", "5"), ("that makes $16 \\times 3 = 48$", "48", "16"),
        ("5 - 3 apples", "2", "3"), (r"The answer is $(1, 2)$.", "(1,2)", "2"), ("H_2", "H_2", "2"),
        ("answer: 3a", "3a", "3"), ("It is 1/2/3", "1/6", "3"), ("The answer is (C).", "C", "B"),
        ("The answer is 72. Let me check: 3 steps", "72", "3"), ("<answer>72</answer>", "72", "7"),
        ("He pays **$72** in all!", "72", "7"), ("- pens: 2\n* 72", "72", "144"), ("It costs $5, not $7.", "7", "5"),
        # Signs, currencies, mixed numbers, scales, groups of digits; boxed or not.
        ("−5", "-5", "5"), ("minus 5", "-5", "5"), (r"\boxed{−5}", "-5", "5"), ("It costs -$5", "-5", "5"),
        (r"\boxed{£18}", "18", "8"), (r"\boxed{18 €}", "18", "8"), (r"\boxed{2 1/2}", "2.5", "1"),
        ("2 1/2", "2.5", "1/2"), (r"\boxed{1\frac12}", "1 1/2", "1/2"), (r"\boxed{1.5}", "1 1/2", "1/2"),
        ("2½", "5/2", "1"), (r"\boxed{5\text{ million}}", "5000000", "5"), ("5 million", "5e6", "5"),
        ("1 234", "1234", "234"), ("1'000", "1000", "0"), (r"\boxed{72^\circ}", "72", "7"),
        (r"\boxed{5:00 \text{ PM}}", "5:00 PM", "5:01 PM"), (r"\boxed{5\text{ cm}^2}", "5", "25"),
        (r"\boxed{x = 1,080}", "1080", "80"), (r"\boxed{101_3}", "101_3", "101_2"), (r"\boxed{C) 5}", "C", "B"),
        (r"\boxed{5}", r"\text{(C) }5", "(C) 6"), (r"\boxed{\varnothing}", r"\emptyset", "0"),
        (r"\boxed{5 less}", "5", "6"), (r"\boxed{5 tens}", "50", "5"),
    ],
)  # fmt: skip
def test_an_answer_is_the_whole_expression(completion: str, right: str, wrong: str) -> None:
    assert call("accuracy", [completion] * 2, answer=[right, wrong]) == [1.0, 0.0]


def test_a_result_of_a_tool_is_no_answer() -> None:
    """A conversation that was cut off ends with what the policy was told, or was to be told."""
    talk = [
        {"role": "assistant", "content": "<tool_call>"},
        {"role": "tool", "content": "72"},
        {"role": "assistant", "content": "It is 71."},
        {"role": "user", "content": "72"},
    ]
    assert call("accuracy", [talk[:2], talk[:3], talk], answer=["72"] * 3) == [0.0, 0.0, 0.0]
    assert call("accuracy", [talk], answer=["71"]) == [1.0]


TOWER = r"\boxed{9^{9^{9^{9}}}}"
HOSTILE = {
    "unclosed boxes": r"\boxed{" * 4000,
    "unclosed boxes, longer": r"\boxed{" * 14_000,
    "boxes that close at the end": r"\boxed{" * 7000 + "}" * 7000,
    "tower of powers": TOWER,
    "large power": r"\boxed{10^{10^{9}}}",
    "factorial": r"\boxed{(10^{7})!}",
    "digits": "1" * 100_000,
    "digits in a box": r"\boxed{" + "9" * 100_000 + "}",
    "groups of digits": "1" + ",234" * 25_000,
    "thin spaces": "1" + r"\," * 50_000,
    "nested braces": r"\boxed{" + "{" * 50_000 + "}" * 50_001,
    "nested fractions": r"\boxed{" + r"\frac{1}{" * 2000 + "1" + "}" * 2001,
    "nested parentheses": r"\boxed{" + "(" * 20_000 + ")" * 20_000 + "}",
    "words": r"\boxed{5 " + "ab " * 30_000 + "}",
    "one word": r"\boxed{5 " + "a" * 100_000 + "}",
    "spaces": r"\boxed{5" + " " * 100_000 + "}",
    "unicode": "\\boxed{" + "\u0663\uff15\U0001d7d8\u00b2\u00bd\u4e94\u200b\u202e" * 10_000 + "}",
    "lone surrogates": "\\boxed{\ud800" * 100 + "}",
    "zeros": "\\boxed{\0" * 100 + "}",
    "thoughts": "<think>" * 10_000 + r"\boxed{1}",
    "signs": r"\boxed{" + "+-" * 20_000 + "1}",
    "sum": r"\boxed{" + "x+" * 5000 + "x}",
}


@pytest.mark.slow
@pytest.mark.parametrize("gold", ["7", r"\frac{1}{3}"])
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_completion_is_wrong_and_quickly_so(text: str, gold: str) -> None:
    call("accuracy", [r"\boxed{\frac{1}{2}}"], answer=["x"])  # what is loaded once is no part of it
    before = processor_seconds()
    assert call("accuracy", [text], answer=[gold]) == [0.0]
    assert processor_seconds() - before < 1.5


def processor_seconds() -> float:
    """Of this process and of the children that have ended: a busy machine does not change it."""
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


@pytest.mark.slow
def test_slow_wrong_answers_are_wrong_beside_right_ones() -> None:
    right, half = r"\boxed{7}", r"\boxed{\frac{14}{4}}"
    assert call("accuracy", [TOWER, right, TOWER, right, right, TOWER, right, right], answer=["7"] * 8) == (
        [0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    )
    assert call("accuracy", [TOWER, half, TOWER, right, half], answer=[r"\frac{7}{2}"] * 5) == [0.0, 1.0, 0.0, 0.0, 1.0]


@pytest.mark.slow
def test_a_whole_group_of_slow_answers_stays_within_the_limit_of_a_call() -> None:
    before = processor_seconds()
    assert call("accuracy", [TOWER] * 16, answer=["7"] * 16) == [0.0] * 16
    assert processor_seconds() - before < 0.8 * JobConfig().rewards.timeout_s


@pytest.mark.parametrize("name", ["accuracy", "cosine_length", "length"])
def test_a_thought_that_the_prompt_has_opened_holds_no_answer(name: str) -> None:
    ids = [[0], [0, 0]]
    texts = [r"so \boxed{4}", r"so \boxed{5}</think> \boxed{4}"]
    rewards = call(name, texts, answer=["4", "4"], prefill="<think>\n", completion_ids=ids)
    assert rewards[0] <= 0 and rewards[1] == (pytest.approx(-0.5) if name == "length" else pytest.approx(1.0, abs=0.1))


@pytest.mark.parametrize(("gold", "number"), GSM8K)
def test_accuracy_reads_gsm8k(gold: str, number: str) -> None:
    rewards = call("accuracy", [f"So it is {number}.", rf"\boxed{{{number}}}", "#### 5", gold], answer=[gold] * 4)
    assert rewards == [1.0, 1.0, 0.0, 1.0]


def test_chat_completions_are_read_too() -> None:
    completion = [{"role": "assistant", "content": r"\boxed{4}"}]
    assert call("accuracy", [completion], answer=["4"]) == [1.0]
    assert call("exact_match", [[{"role": "assistant", "content": "4"}]], answer=["4"]) == [1.0]


@pytest.mark.parametrize(
    ("completion", "reason", "reward"),
    [
        ("640", "stop", 1.0), ("641", "stop", 0.5 * 2 / 3), ("046", "stop", 0.5 / 3), ("111", "stop", 0.0),
        ("64", "stop", 0.0), ("6400", "stop", 0.0), ("", "stop", 0.0), ("640", "length", 0.0), ("640", "abort", 0.0),
    ],
)  # fmt: skip
def test_arithmetic(completion: str, reason: str, reward: float) -> None:
    # 12 + 34 = 046, digits reversed.
    assert call("arithmetic", [completion], answer=["640"], finish_reasons=[reason]) == [pytest.approx(reward)]
    assert call("arithmetic", [completion] * 2, answer=[640, None], finish_reasons=[reason] * 2)[1] is None


def test_exact_match() -> None:
    assert call("exact_match", [" a b\n", "a  b", "c"], answer=["a b", "a b", None]) == [1.0, 0.0, None]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>so</think> 4", 1.0), ("\n<think>\nso\nthat</think>\n4\n", 1.0), ("<think></think>4", 1.0),
        ("<think>so</think>", 0.0), ("<think>so 4", 0.0), ("so</think> 4", 0.0), ("x <think>so</think> 4", 0.0),
        ("<think>a</think><think>b</think> 4", 0.0), ("<think><think>a</think> 4", 0.0), ("4", 0.0),
    ],
)  # fmt: skip
def test_format(completion: str, reward: float) -> None:
    assert call("format", [completion]) == [reward]


def test_format_where_the_prompt_ends_with_the_opening() -> None:
    texts = ["so</think> 4", "so 4", "<think>so</think> 4", "so</think>"]
    assert call("format", texts, prefill="<think>\n") == [1.0, 0.0, 0.0, 0.0]
    assert call("format", ["4"], prefill="<think>\n\n</think>\n\n") == [1.0]


def test_soft_overlong_is_free_to_80_percent_then_falls_to_minus_one() -> None:
    ids = [[0] * n for n in (0, 8, 9, 10)]
    assert call("soft_overlong", [""] * 4, completion_ids=ids) == pytest.approx([0.0, 0.0, -0.5, -1.0])


def test_cosine_length() -> None:
    ids = [[0] * n for n in (0, 5, 0, 5, 3)]
    answers = ["4", "4", "5", "5", "x^2 +"]
    rewards = call("cosine_length", ["4"] * 5, completion_ids=ids, answer=answers)
    assert rewards[:4] == pytest.approx([1.0, 0.75, -1.0, -0.75])
    assert rewards[4] is None
    # Review: what reaches the limit is punished as the worst, right or wrong.
    at_limit = call("cosine_length", ["4", "4"], completion_ids=[[0] * 10] * 2, answer=["5", "4"])
    assert at_limit == [-1.0, -1.0]
    quarter = call("cosine_length", ["4"], completion_ids=[[0, 0]], answer=["4"])[0]
    assert quarter == pytest.approx(0.75 + 0.25 * math.cos(math.pi / 5))


def test_length_compares_within_the_group_and_never_rewards_wrong_answers() -> None:
    ids = [[0] * n for n in (2, 4, 6, 2)]
    rewards = call("length", ["4", "4", "4", "5"], completion_ids=ids, answer=["4"] * 4)
    assert rewards == pytest.approx([0.5, 0.0, -0.5, 0.0])
    assert call("length", ["4", "5"], completion_ids=[[0], [0]], answer=["4", "4"]) == [0.0, 0.0]


def test_repetition_counts_repeated_four_grams() -> None:
    # a loop of two tokens has two different 4-grams among its seven.
    ids = [[1, 2, 3], [1, 2, 3, 4, 5, 6], [1, 2] * 5, [7] * 13]
    assert call("repetition", [""] * 4, completion_ids=ids) == pytest.approx([0.0, 0.0, -5 / 7, -9 / 10])


def test_every_built_in_takes_any_column_and_some_need_an_answer() -> None:
    for name in BUILTIN:
        assert len(call(name, ["4", "5"], answer=["4", "4"])) == 2
        if name in NEEDS_ANSWER:
            with pytest.raises(TypeError, match="answer"):
                call(name, ["4"])
        else:
            call(name, ["4"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("acuracy", "nearest: accuracy"),
        ("nonsense", "must be one of accuracy"),
        ("no.such.module:reward", "no.such.module"),
        ("torchtitan.rollout.rewards.builtin_rewards:aritmetic", "nearest: arithmetic"),
        ("torchtitan.rollout.rewards.builtin_rewards:PARTIAL_CREDIT", "not a function"),
        ("torchtitan.rollout.rewards.builtin_rewards:", "unknown reward function"),
    ],
)
def test_unknown_functions_are_named(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_reward(name)
