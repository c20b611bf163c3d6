"""Heads are found and completions are cut and judged as train/README.md says."""

from train.heads import Completion, Tally, choose, heads_of, statements

SOURCE = '''
class A:
    @property
    def size(self, a,
             b=1):
        """How many."""
        return self._size

    def empty(self):
        """Nothing."""

    def later(self): ...

    async def read(self):
        return await self.x()
'''


def test_heads() -> None:
    assert sorted(heads_of(SOURCE)) == [
        "async def read(self):",
        'def size(self, a,\n         b=1):\n    """How many."""',
    ]
    assert choose([SOURCE, "not python ("], 5, seed=1) == choose([SOURCE], 5, seed=1)


def test_cut_at_the_first_line_that_is_not_indented() -> None:
    one = Completion("def f(x):", limit=100)
    assert not one.push(b"\n    return x\n")
    assert not one.push(b"\n")
    assert one.push(b"\ndef g")
    assert one.source() == "def f(x):\n    return x\n\n\n"
    assert statements(one.source()) == 1


def test_cut_at_the_limit_keeps_whole_lines() -> None:
    one = Completion("def f(x):", limit=19)
    assert one.push(b"\n    y = x\n    retu")
    assert one.source() == "def f(x):\n    y = x\n"


def test_tally() -> None:
    good, bad, idle = Completion("def f():", 99), Completion("def f():", 99), Completion('def f():\n    """Do."""', 99)
    good.push(b"\n    return 1"), good.push(b"")
    bad.push(b"\n    return (\nx")
    idle.push(b"")
    assert Tally.of([good, bad, idle, idle]) == Tally(0.75, 0.25, 1.0)
