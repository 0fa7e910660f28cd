"""Tables of figures, a row as soon as it is known."""

from __future__ import annotations


def table(*headings: str) -> None:
    print()
    row(*headings)
    row(*("---" for _ in headings))


def row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)
