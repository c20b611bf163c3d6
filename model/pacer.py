"""How much of the prompts a step may read beside running replies, learnt from how long steps take."""

SHARE = 0.7  # time that prompts may add to a step, as a share of what the step takes without them
CROWD = 4  # so many prompts share that; more add more, or a crowd of them would wait for ever behind a few replies
MOST = 4.0  # but never more than this many times SHARE
FORGET = 64  # steps after which the time of a step without prompts is measured anew
WEIGHT = 0.3  # of a new measurement in the average of steps without prompts
GROWTH = 1.15  # of the budget over what was measured: the first tokens may be free, and the next ones not


class Pacer:
    """Keeps steps that write replies short: with a prompt they take at most 1 + SHARE times as long as without.

    No clock: it is told the times. A step that only reads prompts delays nobody and may always read a whole chunk.
    """

    def __init__(self, chunk: int, grid: int, most: int) -> None:
        """A budget is from ``grid`` to ``most`` tokens, by ``grid``; where there are no replies it is ``chunk``."""
        self._chunk, self._grid, self._most = chunk, grid, most
        self._budget = float(grid)
        self._share = SHARE  # in force
        self._plain: dict[int, float] = {}  # seconds without prompts, by the bits of the number of replies
        self._asked: dict[int, int] = {}  # when that was last measured
        self._step = 0
        self._calm = 0  # steps without prompts that are due
        self._planned = 0  # the last answer

    def budget(self, writing: int, reading: int) -> int:
        """Tokens for the prompts of ``reading`` sequences beside ``writing`` replies; 0 where a step without is due.

        Those come in pairs. A step may be launched before the last one's end is seen, and one with prompts takes the
        host longer to launch: of a pair the first is measured undisturbed.
        """
        self._planned = self._answer(writing, reading)
        return self._planned

    def _answer(self, writing: int, reading: int) -> int:
        if reading == 0:
            return 0
        if writing == 0:
            return self._chunk
        self._step += 1
        size = writing.bit_length()
        if self._step - self._asked.get(size, -FORGET) >= FORGET:
            self._asked[size] = self._step
            self._calm = 2
        if self._calm > 0:
            self._calm -= 1
            return 0
        self._share = SHARE * min(max(1.0, reading / CROWD), MOST)
        return max(self._grid, int(self._budget) // self._grid * self._grid)

    def measured(self, writing: int, tokens: int, seconds: float) -> None:
        """A step with ``writing`` replies and ``tokens`` of prompts took ``seconds``.

        Of one without prompts that counts only where none with prompts was planned behind it: see budget().
        """
        size = writing.bit_length()
        if not writing or (not tokens and self._planned):
            return
        if not tokens:
            self._asked[size] = self._step
            known = self._plain.get(size, seconds)
            self._plain[size] = known + WEIGHT * (min(seconds, 3 * known) - known)
        elif size in self._plain:
            extra = max(seconds - self._plain[size], 1e-9)
            wanted = tokens * self._plain[size] * self._share / extra
            most = max(self._budget, tokens * GROWTH + self._grid)
            self._budget = min(max(wanted, self._budget / 2), most, self._most)
