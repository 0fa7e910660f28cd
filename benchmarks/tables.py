"""Tables of figures; prints each row at once."""

from __future__ import annotations


def table(*headings: str) -> None:
    print()
    row(*headings)
    row(*("---" for _ in headings))


def row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)
