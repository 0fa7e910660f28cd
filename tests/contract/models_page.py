"""The table of families in docs/models.md, from what `models/test_every_family.py` holds them to.

Run it to write the table again: `python -m contract.models_page` in tests/.
"""

from __future__ import annotations

from pathlib import Path

from models.family_outcomes import OUTCOMES, SERVED

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
MARK = "<!-- families -->"


def table() -> str:
    """A row for each outcome: those that are served first, then by their number."""
    families: dict[str, list[str]] = {outcome: [] for outcome in SERVED}
    for family, outcome in sorted(OUTCOMES.items()):
        families.setdefault(outcome, []).append(family)
    reasons = sorted(families.keys() - set(SERVED))
    reasons.sort(key=lambda reason: len(families[reason]), reverse=True)
    rows = [f"| {each} | {_names(families[each])} |" for each in SERVED]
    rows += [f"| none: “{each}” | {_names(families[each])} |" for each in reasons]
    return "\n".join(["| computed by | `model_type` |", "|---|---|", *rows])


def _names(families: list[str]) -> str:
    return ", ".join(f"`{family}`" for family in families)


def with_table(page: str) -> str:
    before, _, rest = page.partition(f"{MARK}\n")
    _, found, after = rest.partition(MARK)
    assert found, f"{MARK} must stand before and after the table"
    return f"{before}{MARK}\n{table()}\n{MARK}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
