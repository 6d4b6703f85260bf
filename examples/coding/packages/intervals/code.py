"""Half-open intervals of whole numbers: (2, 5) holds 2, 3 and 4."""


def normalized(intervals):
    """Return the same numbers as sorted intervals that neither overlap nor touch; empty ones are dropped."""
    result = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if result and start <= result[-1][1]:
            last = result[-1]
            result[-1] = (last[0], max(last[1], end))
        else:
            result.append((start, end))
    return result


def size(intervals):
    """Return how many numbers the intervals hold together."""
    total = 0
    for start, end in normalized(intervals):
        total += end - start
    return total


def contains(intervals, number):
    """Return whether one of the intervals holds the number."""
    return any(start <= number and number < end for start, end in intervals)


def intersection(first, second):
    """Return the numbers that both lists hold, normalized."""
    left, right = normalized(first), normalized(second)
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        start = max(left[i][0], right[j][0])
        end = min(left[i][1], right[j][1])
        if start < end:
            result.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return result


def gaps(intervals, start, end):
    """Return the numbers from start to end (without it) that no interval holds, normalized."""
    result = []
    for low, high in normalized(intervals):
        if high <= start:
            continue
        if low >= end:
            break
        if low > start:
            result.append((start, low))
        start = high
    if start < end:
        result.append((start, end))
    return result


def difference(first, second):
    """Return the numbers of the first list that the second does not hold, normalized."""
    result = []
    for start, end in normalized(first):
        result += gaps(second, start, end)
    return result


def first_free(intervals, length, start=0):
    """Return the first number, from start on, at which `length` numbers in a row are free. Raises ValueError for a
    length below 1."""
    if length < 1:
        raise ValueError("length must be at least 1")
    for low, high in normalized(intervals):
        if low - start >= length:
            return start
        start = max(start, high)
    return start
