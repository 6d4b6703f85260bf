from formulas import evaluate, tokens, used_names


def test_tokens():
    assert tokens("a + 12") == ["a", "+", 12]


def test_sum():
    assert evaluate("1 + 2") == 3


def test_names():
    assert evaluate("x", {"x": 4}) == 4


def test_used_names():
    assert used_names("a + b") == ["a", "b"]
