from intervals import contains, gaps, normalized, size


def test_touching_intervals_become_one():
    assert normalized([(3, 5), (1, 3)]) == [(1, 5)]


def test_size():
    assert size([(0, 10)]) == 10


def test_contains():
    assert contains([(0, 3)], 1)


def test_gaps():
    assert gaps([(2, 4)], 0, 6) == [(0, 2), (4, 6)]
