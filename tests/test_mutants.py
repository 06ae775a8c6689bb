"""The rules of mutants change one expression at a time, leave messages alone, and a changed file is still Python."""

import ast

from tests.mutants import mutated, sites

TEXT = '''
def f(x, y=2):
    """Doc: 1 + 1."""
    if x < 0 and not y:
        raise ValueError(f"x is {x - 1}, below 0")
    return -x if x is None else x * 3
'''


def test_each_expression_is_changed_once_and_messages_are_left_alone(tmp_path):
    file = tmp_path / "m.py"
    file.write_text(TEXT)
    found = sites(file, tmp_path)
    assert [site.change for site in found] == [
        "x < 0 and (not y) -> x < 0 or not y",
        "x < 0 -> x <= 0",
        "0 -> 1",
        "not y -> y",
        "-x if x is None else x * 3 -> x * 3 if x is None else -x",
        "x is None -> x is not None",
        "-x -> x",
        "x * 3 -> x / 3",
        "3 -> 4",
    ]
    texts = {mutated(TEXT, site.number) for site in found}
    plain = ast.unparse(ast.parse(TEXT))
    assert len(texts) == len(found) and plain not in texts
    for text in texts:
        assert sum(a != b for a, b in zip(text.splitlines(), plain.splitlines(), strict=True)) == 1
