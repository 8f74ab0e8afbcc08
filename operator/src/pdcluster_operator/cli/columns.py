"""A table that cuts no word, at any width of the terminal.

The last column is free text. If the other columns leave too little room for it, it is printed below
its row. If even the other columns are too wide, a row continues on the next line. Output into a
pipe has no limit of width.
"""

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from pdcluster_operator.cli.output import plain

GAP = 2
INDENT = 2
LEAST_TEXT = 24
"""The free text is printed beside the other columns if it has at least this many cells."""


class Columns:
    """A table for :meth:`rich.console.Console.print` with ``soft_wrap=True``, or in a live view.

    Args:
        headers: the names of the columns; the last one is that of the free text.
        one_line: whether free text that is too long ends with an ellipsis, not in more lines.
    """

    def __init__(self, *headers: str, one_line: bool = False) -> None:
        self._headers = [Text(header, style="bold") for header in headers]
        self._rows: list[list[Text]] = []
        self._one_line = one_line

    def add(self, *cells: str | Text) -> None:
        """Add a row; one cell for each header."""
        self._rows.append([_clean(cell) for cell in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield one :class:`rich.text.Text` a line."""
        width = options.max_width if console.is_terminal else None
        for line in self._lines(console, width):
            line.rstrip()
            yield line

    def _lines(self, console: Console, width: int | None) -> Iterator[Text]:
        rows = [self._headers, *self._rows]
        widths = [max(row[n].cell_len for row in rows) for n in range(len(self._headers) - 1)]
        taken = sum(widths) + GAP * len(widths)
        longest = max(row[-1].cell_len for row in rows)
        for row in rows:
            if width is None:
                yield Text.assemble(*_padded(row, widths), row[-1])
            elif width - taken >= min(LEAST_TEXT, longest):
                first, *more = self._wrapped(console, row[-1], width - taken)
                yield Text.assemble(*_padded(row, widths), first)
                yield from (Text(" " * taken) + line for line in more)
            else:
                yield from _flowing(row[:-1], widths, width)
                if row is not self._headers and row[-1].cell_len:
                    below = self._wrapped(console, row[-1], max(1, width - INDENT))
                    yield from (Text(" " * INDENT) + line for line in below)

    def _wrapped(self, console: Console, text: Text, width: int) -> Sequence[Text]:
        if not self._one_line:
            return list(text.wrap(console, width)) or [Text()]
        short = text.copy()
        short.truncate(width, overflow="ellipsis")
        return [short]


def _clean(cell: str | Text) -> Text:
    """Return what is printed: its width counts."""
    return Text(plain(cell)) if isinstance(cell, str) else Text(plain(cell.plain), cell.style)


def _padded(row: Sequence[Text], widths: Sequence[int]) -> Iterator[Text]:
    for cell, width in zip(row, widths, strict=False):
        yield cell + Text(" " * (width - cell.cell_len + GAP))


def _flowing(row: Sequence[Text], widths: Sequence[int], width: int) -> Iterator[Text]:
    """Yield cells in their columns as long as they fit, whole, and the rest in further lines."""
    line = Text()
    for cell in _padded(row, widths):
        if line.plain.strip() and line.cell_len + cell_len(cell.plain.rstrip()) > width:
            yield line
            line = Text(" " * INDENT)
        line = line + cell
    yield line
