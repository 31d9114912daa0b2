"""The form in which the functions of `import meshwright` return results: values, a table of them, and a drawing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from meshwright.show import html
from meshwright.show.terminal import table


class Result(ABC):
    """A result that prints as a table, and that a notebook shows as a table with a drawing."""

    @abstractmethod
    def title(self) -> str:
        """Return a line that says what this is the result of."""

    @abstractmethod
    def table(self) -> Sequence[Sequence[str]]:
        """Return the rows of the table, of which the first is the header."""

    def notes(self) -> Sequence[str]:
        """Return lines that stand below the table."""
        return ()

    def drawing(self) -> str:
        """Return a drawing for notebooks as SVG or HTML, or an empty string."""
        return ""

    def __repr__(self) -> str:
        return "\n".join([self.title(), table(self.table()), *self.notes()])

    def _repr_html_(self) -> str:
        notes = "".join(map(html.note, self.notes()))
        return f"{html.note(self.title())}{html.table(self.table())}{notes}{self.drawing()}"
