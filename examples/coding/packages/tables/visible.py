from tables import group_sums, join, parse, rendered


def test_parse():
    assert parse("a,b\n1,2") == [{"a": "1", "b": "2"}]


def test_group_sums():
    assert group_sums([{"k": "x", "v": 3}], "k", "v") == {"x": 3}


def test_join():
    assert join([{"k": 1, "a": 2}], [{"k": 1, "b": 3}], "k") == [{"k": 1, "a": 2, "b": 3}]


def test_rendered():
    assert rendered([{"name": "a", "n": 10}]) == "name  n\na     10"
