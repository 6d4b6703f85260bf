"""Formulas with + - * / ^, brackets, names and the functions min and max, computed with whole numbers."""

OPERATORS = {"+": 1, "-": 1, "*": 2, "/": 2, "^": 3}


def tokens(text):
    """Split a formula into numbers, names and signs. Raises ValueError for anything else."""
    found, i = [], 0
    while i < len(text):
        character = text[i]
        if character.isspace():
            i += 1
            continue
        end = i + 1
        if character.isdigit():
            while end < len(text) and text[end].isdigit():
                end += 1
            found.append(int(text[i:end]))
        elif character.isalpha():
            while end < len(text) and text[end].isalnum():
                end += 1
            found.append(text[i:end])
        elif character in "+-*/^(),":
            found.append(character)
        else:
            raise ValueError(f"unexpected {character!r}")
        i = end
    return found


def evaluate(text, names=None):
    """Return the value of a formula. `/` rounds down, `^` binds to the right, and a minus in front binds less than
    `^`. Raises ValueError for a formula that is none, KeyError for an unknown name, ZeroDivisionError."""
    rest = tokens(text)
    value = _expression(rest, 1, names or {})
    if rest:
        raise ValueError(f"unexpected {rest[0]!r}")
    return value


def _expression(rest, level, names):
    value = _operand(rest, names)
    while rest and OPERATORS.get(rest[0], 0) >= level:
        operator = rest.pop(0)
        own = OPERATORS[operator]
        other = _expression(rest, own if operator == "^" else own + 1, names)
        value = _apply(operator, value, other)
    return value


def _apply(operator, left, right):
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    if operator == "/":
        return left // right
    if right < 0:
        raise ValueError("negative exponent")
    return left**right


def _operand(rest, names):
    if not rest:
        raise ValueError("the formula ends too early")
    token = rest.pop(0)
    if isinstance(token, int):
        return token
    if token == "-":
        return -_expression(rest, 3, names)
    if token == "(":
        value = _expression(rest, 1, names)
        _expect(rest, ")")
        return value
    if not token[0].isalpha():
        raise ValueError(f"unexpected {token!r}")
    if token in ("min", "max") and rest and rest[0] == "(":
        rest.pop(0)
        values = [_expression(rest, 1, names)]
        while rest and rest[0] == ",":
            rest.pop(0)
            values.append(_expression(rest, 1, names))
        _expect(rest, ")")
        return min(values) if token == "min" else max(values)
    return names[token]


def _expect(rest, sign):
    if not rest or rest.pop(0) != sign:
        raise ValueError(f"expected {sign!r}")


def used_names(text):
    """Return the names that a formula needs, sorted, each once."""
    found = tokens(text)
    names = set()
    for i, token in enumerate(found):
        called = i + 1 < len(found) and found[i + 1] == "("
        if isinstance(token, str) and token[0].isalpha() and not called:
            names.add(token)
    return sorted(names)
