"""Owns exact money: accounts whose sum never changes, and how the rent of shared pages is split.

Never prices anything. Called by `pie`. All amounts are whole credits, so conservation is exact.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

CREDIT = 1_000_000
"""Smallest units in one credit."""


@dataclass(slots=True)
class Bank:
    """Balances. `sum(balances) + pot == endowments - withdrawn`, always, and
    `sum(balances) == endowments - withdrawn - paid + dividends`."""

    balances: dict[Hashable, int] = field(default_factory=dict)
    pot: int = 0
    """What was paid and not yet given back."""
    endowments: int = 0
    withdrawn: int = 0
    paid: int = 0
    dividends: int = 0

    def open(self, holder: Hashable, endowment: int) -> None:
        if holder not in self.balances:
            self.balances[holder] = endowment
            self.endowments += endowment

    def close(self, holder: Hashable) -> None:
        """What is left on the account leaves the economy."""
        self.withdrawn += self.balances.pop(holder, 0)

    def pay(self, holder: Hashable, amount: int) -> int:
        """Pays at most what is there; returns what was paid."""
        amount = max(0, min(amount, self.balances.get(holder, 0)))
        if amount:
            self.balances[holder] -= amount
            self.pot += amount
            self.paid += amount
        return amount

    def share_out(self) -> None:
        """The pot goes to all in equal parts; what does not divide stays in it."""
        part = self.pot // len(self.balances) if self.balances else 0
        if part:
            for holder in self.balances:
                self.balances[holder] += part
            total = part * len(self.balances)
            self.pot -= total
            self.dividends += total


def shapley_split(num_tokens: Mapping[Hashable, Sequence[tuple[Hashable, int]]]) -> dict[Hashable, Fraction]:
    """Shapley value of the rent of shared pages: each page is paid in equal parts by those who hold it.

    `num_tokens` gives for each holder its pages as (page, tokens of that page). Exact: the rent of a
    coalition is the tokens of the union of its pages, a sum of one game per page, and in each of them holders
    are alike.
    """
    holders_of: dict[Hashable, list[Hashable]] = {}
    size_of: dict[Hashable, int] = {}
    for holder, pages in num_tokens.items():
        for page, size in pages:
            holders_of.setdefault(page, []).append(holder)
            size_of[page] = size
    split: dict[Hashable, Fraction] = {holder: Fraction(0) for holder in num_tokens}
    for page, holders in holders_of.items():
        for holder in holders:
            split[holder] += Fraction(size_of[page], len(holders))
    return split
