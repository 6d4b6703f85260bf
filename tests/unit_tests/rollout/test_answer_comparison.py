"""Which answers are the reference, in all the kinds of both: pairs labelled by hand."""

from __future__ import annotations

import pytest

from torchtitan.rollout.rewards.builtin_rewards import accuracy

# Kind -> (reference, answers that equal it, answers that do not).
TABLE: dict[str, list[tuple[str, list[str], list[str]]]] = {
    "words": [
        ("Carla", ["carla", r"\text{Carla}", "Carla."], ["Clara", "Carl", "Carlas"]),
        (r"\text{Brian}", ["Brian"], ["Brain"]),
        ("sin", ["sin"], ["nis"]),
        ("Amy", ["Amy"], ["May", "Mya"]),
        ("on", ["on"], ["no"]),
        ("yes", ["Yes", r"\text{yes}"], ["no", "yes and no"]),
        ("listen", ["listen"], ["silent", "enlist"]),
        ("New York", ["New York", r"\text{New York}"], ["York New", "York"]),
        ("the moon", ["moon"], ["sun"]),
        ("Apollo 11", ["Apollo 11"], ["Apollo 12"]),
        ("Henry VIII", ["Henry VIII"], ["Henry VII"]),
        ("hello world", ["hello world"], ["72", "world"]),
        ("红色", ["红色", r"\text{红色}"], ["绿色", "红"]),
        ("да", ["Да"], ["нет", "ад"]),
        ("Zürich", ["Zürich"], ["Zurich"]),
        ("x大于3", ["x大于3"], ["x大于4"]),
        ("की", ["की"], ["का"]),  # vowels are marks
        ("卡尔·马克思", ["卡尔·马克思"], ["卡尔·马克", "马克思"]),
        ("AT&T", ["AT&T", r"\text{AT&T}"], ["AT", "T&AT"]),
        ("Ph.D.", ["Ph.D.", "Ph.D"], ["M.D.", "P.H."]),
        ("true/false", ["true/false", "True/False"], ["true", "false/true"]),
        ("gamma rays", ["gamma rays", "Gamma rays"], ["gamma", "beta rays"]),
        ("delta airlines", ["Delta Airlines"], ["delta"]),
        ("lambda calculus", ["lambda calculus"], ["lambda"]),
        ("J. K. Rowling", ["J. K. Rowling", "J.K. Rowling"], ["J. R. R. Tolkien", "Rowling"]),
        ("E. coli", ["E. coli", "e. coli"], ["E. faecalis"]),
        ("A. Lincoln", ["A. Lincoln"], ["A. Jackson"]),
        ("S. Africa", ["S. Africa"], ["S. Korea"]),
        ("5 thouſand", ["5 thouſand", "5 thousand"], ["5"]),
        ("ſep 5", ["ſep 5"], ["5"]),
        (r"\emph{yes}", ["yes", '"Yes"'], ["eyes"]),
    ],
    "letters that may be factors": [
        ("xy", ["yx", r"x \cdot y"], ["xz"]),
        ("abc", ["cba"], ["abd"]),
        ("kx", ["xk"], ["k+x"]),
    ],
    "choices": [
        ("BD", ["B, D", "DB", "B and D", "(B), (D)"], ["B", "B and C", "B, C, D"]),
        ("B, D", ["D and B"], ["D"]),
        ("C, A, B", ["C, A, B"], ["B, A, C"]),
        ("A", [r"\text{A}", "(A)", "A. Paris", "Option A"], ["AB", "B", "B. Paris"]),
        ("A. Paris", ["A", "(A) Paris", "A. Paris", "A. paris."], ["B", "A. London", "B. Paris"]),
        ("A: 5", ["A: 5", "A", "5", "A. 5.0"], ["A: 7", "B: 5"]),
        ("A: " * 1000 + "x y", ["A", "A: " * 1000 + "z"], ["B"]),  # deep
        ("A. x^2", ["A", "A. $x^2$"], ["B. x^2"]),
    ],
    "units and languages": [
        ("24小时", ["24小时", "24", r"24\text{小时}", "1天"], ["25小时", "24分钟", "24天", "2"]),
        ("30分钟", ["30分钟", "0.5小时"], ["3分钟"]),
        ("5 км", ["5 км", "5", "5 km", "5000 m"], ["6 км", "5 m"]),
        ("15 años", ["15 años", "15"], ["16 años"]),
        ("7個", ["7個"], ["8個"]),
        ("3万元", ["30000", "3万"], ["3"]),
        ("60 minutes", ["60", "1 hour", "60 min"], ["60 hours", "60 seconds"]),
        ("5 kg", ["5000 g", "5"], ["5 g", "5 lbs"]),
        ("50 cents", ["50", "0.5 dollars"], ["50 dollars"]),
        ("5 apples", ["5", "5 apples"], ["6 apples"]),
        ("5 घंटे", ["5"], ["6 घंटे"]),
        ("5千米", ["5 km", "5"], ["5 m"]),
        (r"3\sqrt{2} \text{ cm}", [r"3\sqrt{2}", r"\sqrt{18} cm"], [r"3\sqrt{3}"]),
        ("3t", ["t \\cdot 3"], ["3"]),  # a variable that could be a unit
        ("2ab", ["2ba"], ["2"]),
    ],
    "powers": [
        (r"\frac{1}{2^{99}}", ["2^{-99}"], [r"\frac{1}{2^{98}}", "0"]),
        (r"\frac{1}{3^{40}}", [r"3^{-40}"], [r"\frac{1}{3^{41}}"]),
        ("2^{-60}", [r"\frac{1}{4^{30}}"], ["2^{-70}", "0"]),
        ("7^{-5000}", [r"\frac{1}{7^{5000}}"], ["7^{-5001}"]),
        (r"\frac{2^{2005}+1}{3 \cdot 2^{2006}}", [r"\frac{1}{6}+\frac{1}{3 \cdot 2^{2006}}"], [r"\frac{1}{6}"]),
        ("1-2^{-100}", [r"\frac{2^{100}-1}{2^{100}}"], ["1"]),
        (r"\frac{1}{2004!}", [r"\frac{1}{2004 \cdot 2003!}"], [r"\frac{1}{2006!}"]),
        ("2^{64}", ["18446744073709551616", "4^{32}"], ["18446744073709551615"]),
        ("e^{-50}", [r"\frac{1}{e^{50}}"], ["e^{-60}", "0"]),
        ("1-e^{-50}", ["1-e^{-50}"], ["1"]),
        (r"10^{-7}", ["1e-7", "0.0000001"], ["0.0000002", "0"]),
        ("10⁻²⁰", ["10^{-20}"], ["10⁻²¹", "0"]),
        ("0.5^{100}", ["2^{-100}"], ["0.5^{101}"]),
        (r"\sin(10^{-20})", [r"\sin(10^{-20})"], ["10^{-20}", "0"]),
        ("2^{-60}x", [r"\frac{x}{2^{60}}"], ["2^{-70}x"]),
        ("x > 2^{-60}", ["2^{-60} < x"], ["x > 2^{-70}"]),
        ("(2^{-60}, 1)", [r"(\frac{1}{2^{60}}, 1)"], ["(2^{-70}, 1)"]),
        ("[2^{-60}, 1]", ["[2^{-60}, 1]"], ["[2^{-70}, 1]", "[2^{-60}, 1)"]),
        (
            r"\begin{pmatrix}2^{-60}\\1\end{pmatrix}",
            [r"\begin{bmatrix}\frac{1}{2^{60}}\\1\end{bmatrix}"],
            [r"\begin{pmatrix}2^{-70}\\1\end{pmatrix}", r"\begin{pmatrix}1\\2^{-60}\end{pmatrix}"],
        ),
    ],
    "digits in groups": [
        (r"11,\! 111", ["11111", r"11,\!111", "11,111"], ["11", "111"]),
        (r"11,\! 111,\! 111,\! 100", ["11111111100"], ["11111111101"]),
        (r"1,\!234", ["1234", r"1\,234"], ["1", "234"]),
    ],
    "decimals of six digits": [
        (r"\pi", ["3.14159", "3.141593"], ["3.14", "3.1416"]),
        (r"100\pi", ["314.159"], ["314.16"]),
        (r"\frac{\sqrt{2}}{10}", ["0.141421"], ["0.1414"]),
        (r"\sqrt{2} \cdot 10^{-20}", [r"1.41421 \cdot 10^{-20}"], [r"\sqrt{3} \cdot 10^{-20}", "0"]),
        ("0.1", ["0.10"], ["0.10000001"]),
    ],
    "upright letters and i": [
        (r"1 - \frac{1}{\mathrm{e}}", [r"1 - \frac{1}{\mathrm{e}}", "1-e^{-1}"], [r"1 + \frac{1}{\mathrm{e}}", "1"]),
        (r"2\mathrm{i}", ["2i", r"2\mathrm{i}", "(1+i)^2"], ["2", "-2i"]),
        ("3-4i", [r"-4\mathrm{i}+3"], ["3+4i", "3"]),
        (r"2\mathrm{x}", ["2x"], ["2"]),
    ],
    "sequences": [
        (r"1, 2, \ldots, n", [r"1,2,\dots,n", "1, 2, ..., n"], [r"1, 3, \ldots, 2n-1", "2", "1, 2, n"]),
        (r"2, 4, \ldots, 2n", [r"2, 4, \ldots, n+n"], [r"2, 6, \ldots, 2n", r"2, 4, \ldots, 3n"]),
        (r"a_1, a_2, \cdots", [r"a_1, a_2, \ldots"], [r"a_1, a_3, \ldots"]),
        ("1, 1, 2, 3, ...", [r"1, 1, 2, 3, \ldots"], ["1, 2, 3, 4, ..."]),
        (r"1+2+\cdots+n", [r"1 + 2 + \cdots + n"], [r"1+3+\cdots+(n-1)", "3+n"]),
        ("x_1=1, x_2=2", ["1, 2", "x_2=2, x_1=1"], ["2, 1", "x_1=2, x_2=1"]),
        ("（1，2）", ["(1,2)"], ["(2,1)"]),
        ("1 → 2 → 3", [r"1 \to 2 \to 3", "1, 2, 3"], ["1 → 3 → 2"]),
        ("A-B-C", ["A-B-C"], ["A-C-B"]),
        ("1 2 3", ["1 2 3", "1, 2, 3"], ["1 3 2", "6"]),
        (r"1,\ 2,\ \ldots,\ n", [r"1,2,\ldots,n"], [r"1,3,\ldots,n"]),
        ("1331 and 1728", ["1728, 1331", r"1331 \text{ and } 1728"], ["1728", "1331, 1729", "1331, 1728, 1"]),
        ("(1,2,3)", [r"\left(1, 2, 3\right)", "1,2,3", "[1,2,3]"], ["(1,3,2)", "(1,2)"]),
        (r"\{1, 2\}", ["2, 1", r"\left\{2,1\right\}"], ["(2, 3)", "1"]),
        ("(0,1)", ["(0,1)", r"x \in (0,1)", "0 < x < 1"], ["[0,1]", "(1,0)", "(0,1.5)"]),
        (r"[0,\infty)", [r"x \ge 0", r"\left[0, +\infty\right)"], [r"(0,\infty)", "x > 0"]),
        ("(1,2),(3,4)", ["(3,4), (1,2)"], ["(1,2)", "(2,1),(3,4)"]),
        ("100, 200, 300", ["100,200,300"], ["100,200", "100,200,301"]),
        ("1,234", ["1234"], ["1, 234"]),
        ("x=1, y=2", ["y=2, x=1", "1, 2", "(1,2)"], ["x=2, y=1", "2, 1"]),
        (r"\pm 1", ["1, -1", "x = 1 or x = -1"], ["1"]),
        ("red, green", ["green, red", "red and green"], ["red", "red, blue"]),
        ("3 apples and 4 pears", ["3 apples and 4 pears", "3, 4"], ["4", "3 apples"]),
        ("x^2, x^3", ["x^3, x^2"], ["x^2, x^4"]),
        ("1:2:3", ["1:2:3"], ["1:4:9"]),
    ],
    "dates": [
        ("2024-01-05", ["2024-01-05", "January 5, 2024", "5 Jan 2024"], ["2024-05-01", "2018", "January 5, 2023"]),
        ("July 4, 1776", ["July 4th, 1776", "4 July 1776"], ["June 4, 1776", "4", "1776"]),
        ("May 5", ["May 5th", "5 May"], ["May 6", "5"]),
        ("7月4日", ["7月4日", "July 4"], ["7月5日"]),
        ("2024年5月5日", ["2024年5月5日", "2024-05-05"], ["2024年5月6日"]),
    ],
    "formulas": [
        ("x=3", ["3"], ["y=3", "4"]),
        ("y=2x+1", ["2x+1", "y-2x-1=0"], ["2x+2"]),
        (r"50\%", ["0.5", "50"], ["5"]),
        ("2 1/2", ["2.5", r"\frac{5}{2}"], ["1", "2"]),
        ("sin x", [r"\sin x"], ["x", r"\sin y"]),
        ("log 100", [r"2"], ["100"]),
        (r"2 \cdot 3", ["6"], ["5"]),
        ("ln 2", [r"\ln 2"], ["2 ln 2"]),
        ("x ≥ 3", [r"x \ge 3", "[3,∞)"], ["x > 3"]),
        (r"\sqrt{12}", [r"2\sqrt{3}"], [r"3\sqrt{2}"]),
        (r"\emptyset", [r"\varnothing"], ["0"]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", TABLE)
def test_equal_answers_are_right_and_others_wrong(kind: str) -> None:
    pairs = [
        (gold, answer, right)
        for gold, *right_and_wrong in TABLE[kind]
        for right in (1, 0)
        for answer in right_and_wrong[1 - right]
    ]
    rewards = accuracy(
        completions=[rf"\boxed{{{answer}}}" for _, answer, _ in pairs], answer=[gold for gold, *_ in pairs]
    )
    assert [(*pair[:2], reward) for pair, reward in zip(pairs, rewards, strict=True)] == pairs


# (reference, completions that give it, completions that do not), without a box.
SAID = [
    ("yes", ["The answer is yes.", "**Answer:** Yes", "So the answer is yes, because 3 > 2.", "yes", "ANSWER: YES",
      "Yes, as 3 is prime.", "The answer is therefore yes.", "<answer>yes</answer>", "**Final Answer**\n\nyes"],
     ["The answer is no.", "The answer is yes. No, the answer is no.", "eyes", "The answer is not yes.",
      "Yes or no?", "The answer is yes or no.", "5"]),
    ("Evelyn", ["Thus **Evelyn** wins.", "The answer is $\\text{Evelyn}$.", "The fastest is Evelyn.", "#### Evelyn"],
     ["Thus **Evelin** wins.", "Evelyn ran. The answer is Bob.", "It is Bob, not Evelyn."]),
    ("红色", ["答案是红色。", "答案：红色"], ["答案是绿色。"]),
    ("C", ["C", "**C**", "The correct option is C.", "Final choice: C", "The answer is C) 12",
      "The answer is C, not B."],
     ["B", "The answer is B, not C.", "A or C"]),
    ("no solution", ["So the equation has no solution.", "Answer: no solution"], ["It has a solution."]),
    ("2, 3", ["The answer is 2 and 3.", "Answer: 3, 2"], ["The answer is 2.", "Answer: 2, 4"]),
    ("42", ["The answer is 42, since 6*7=42 and 5 < 6.", "The answer is 42 (see step 3)."],
     ["The answer is 5 (not 42)."]),
    ("B, D", ["The answer is B and D.", "Answer: BD"], ["The answer is B.", "Answer: A, B, D"]),
    ("#### 42", ["2+40=42\n#### 42\nSo after 3 days.", "#### $42\n\nQ: 7 + 8", "#### 42 apples\nThat was 1."],
     ["#### 41\nSo 42", "#### 42\nThe answer is 43.", "#### 42. Next\nThis gives 5"]),
    ("9", [r"\(2003^{2002^{2001}}\) ends with \[Answer: 009\]", "ANSWER: 9. I checked 3 times."], [r"\[Answer: 8\]"]),
    ("7", ["#### Step 2: add 3 and 4\nWe get 7", "#### 2. Add\nIt is 7"], ["#### Step 7: it is 6"]),
    ("1, 2, 3", ["#### 1, 2, 3", "The answer is 1, 2, 3"], ["#### 1, 2, 4", "#### 1, 2"]),
    ("J. K. Rowling", ["The answer is J. K. Rowling.", "It was J. K. Rowling.", "J. K. Rowling"],
     ["The answer is J. R. R. Tolkien.", "The answer is J. R. R. Tolkien. He lived in Oxford."]),
    ("S. Korea", ["The answer is S. Korea.", "The answer is S. Korea because it won."], ["The answer is S. Africa."]),
    ("B. Paris", ["The answer is B. Paris.", "The answer is B. The others are wrong.", "The answer is B."],
     ["The answer is C. Paris."]),
    ("Life is Beautiful", ["Life is Beautiful", "The answer is Beautiful. No, the answer is Life is Beautiful."],
     ["Beautiful", "Life is Ugly"]),
    ("To be or not to be", ["To be or not to be", "to be, or not to be."], ["To be"]),
    ("Not so fast", ["Not so fast", "Not so fast!"], ["Not fast", "So fast"]),
    ("N/A", ["N/A", " N/A\n"], ["N/B"]),
    ("vitamin B12", ["vitamin B12"], ["B12"]),
    ("George W. Bush", ["The answer is George W. Bush."], ["The answer is George W. Lee."]),
    ("Paris", ["So Paris", "It is Paris."], ["I think so Paris"]),
    ("May 5, 2024", ["The answer is May 5, 2024."], ["The answer is May 6, 2024."]),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "right", "wrong"), SAID)
def test_answers_without_a_box(gold: str, right: list[str], wrong: list[str]) -> None:
    texts = right + wrong
    rewards = accuracy(completions=texts, answer=[gold] * len(texts))
    assert list(zip(texts, rewards, strict=True)) == [(text, float(text in right)) for text in texts]
