"""A market made up of two regimes, for those who have no minute bars."""

from dataclasses import dataclass
from datetime import date, datetime, time, timedelta

import numpy as np
import torch
from numpy.typing import NDArray

from wellposed.errors import InputError
from wellposed.tasks.exchange import us_open
from wellposed.tasks.minute_bars import MINUTE, BarCounts, Bars


@dataclass(frozen=True)
class Regimes:
    """Prices whose logarithm is a random walk that is calm or turbulent, as a Markov chain has it.

    ``log p_{t+1} = log p_t + s_t e_t`` with standard normal e, where ``s_t`` is `calm` or `turbulent` and the
    regime changes after each minute with probability one over the length it has on average. Nothing happens at
    night. Until `shift` calm prevails; from that day on turbulence does, and `level` multiplies the price as the
    squeeze of 2021 did with that of AMC.

    Args:
        first, days: the trading days, of 390 minutes each.
        shift: which of them is the first of the test period.
        calm, turbulent: standard deviation of the changes of the logarithm in a minute.
        long, short: mean minutes of the prevailing regime and of the other one.
        price: the first one.
        level: factor on the price at the shift.

    Example:
        >>> market = Regimes(days=4, shift=3)
        >>> bars = market.bars(torch.Generator().manual_seed(0))
        >>> len(bars.prices), str(bars.minutes[0])
        (1560, '2015-02-02T09:30')
    """

    first: str = "2015-02-02"
    days: int = 300
    shift: int = 240
    calm: float = 4e-4
    turbulent: float = 2.5e-3
    long: float = 900.0
    short: float = 90.0
    price: float = 10.0
    level: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.shift < self.days or min(self.long, self.short) < 1:
            raise InputError(
                f"shift must lie in 1..days - 1 and regimes last a minute at least; received {self.shift} of "
                f"{self.days} days, {self.long} and {self.short} minutes"
            )

    @property
    def calendar(self) -> list[date]:
        """The trading days."""
        found: list[date] = []
        day = date.fromisoformat(self.first)
        while len(found) < self.days:
            found += [day] if us_open(day) else []
            day += timedelta(1)
        return found

    def turbulence(self, generator: torch.Generator) -> NDArray[np.bool_]:  # (days * 390,)
        """Draws which minutes are turbulent."""
        draws = torch.rand(self.days * 390, generator=generator, dtype=torch.float64).tolist()
        leave = (1 / self.long, 1 / self.short)  # the prevailing regime, the other one
        shift, other, states = self.shift * 390, False, []
        for minute, draw in enumerate(draws):
            states.append(other != (minute >= shift))
            other ^= draw < leave[other]
        return np.array(states)

    def bars(self, generator: torch.Generator) -> Bars:
        """Draws the prices."""
        scale = np.where(self.turbulence(generator), self.turbulent, self.calm)
        steps = scale * torch.randn(len(scale), generator=generator, dtype=torch.float64).numpy()
        steps[self.shift * 390] += np.log(self.level)
        opening = np.array([datetime.combine(day, time(9, 30)) for day in self.calendar], "datetime64[m]")
        minutes: NDArray[np.datetime64] = np.add.outer(opening, np.arange(390) * MINUTE).ravel()
        counts = BarCounts(read=len(minutes), days=self.days)
        prices = self.price * np.exp(np.cumsum(steps))
        return Bars("two regimes, made up", minutes, prices, counts=counts)
