"""Numbers as a page shows them."""

from __future__ import annotations

from tests.browser.reader import Reader


def cells(reader: Reader, table: str) -> list[list[str]]:
    """Return the texts of the rows of a table."""
    rows = reader.page.locator(f"{table} tbody tr")
    return [row.locator("td").all_text_contents() for row in rows.all()]


def milliseconds(ns: float) -> str:
    return f"{ns / 1e6:,.2f}"


def duration(ns: float) -> str:
    """Return a time as the page writes it: three digits."""
    for size, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if ns >= size:
            return f"{float(f'{ns / size:.3g}'):g} {unit}"
    return f"{round(ns)} ns"
