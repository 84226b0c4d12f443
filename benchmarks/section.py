"""One part of a report: a table, what it says in words, and a column of the plot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from matplotlib.axes import Axes


class Section(ABC):
    """The figures of one comparison."""

    @property
    @abstractmethod
    def title(self) -> str:
        """Say what was compared."""

    @property
    @abstractmethod
    def legend(self) -> str:
        """Say what the table's signs and columns mean."""

    @abstractmethod
    def cells(self) -> Iterator[list[str]]:
        """Yield the table's head and its rows."""

    @abstractmethod
    def remarks(self) -> Iterator[str]:
        """Yield what the figures say."""

    @abstractmethod
    def draw(self, top: Axes, bottom: Axes) -> None:
        """Draw two plots."""
