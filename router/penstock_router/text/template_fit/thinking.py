"""Tells a chat template whether, and how much, its model should think.

Requests and templates have different variables for this, so the request's wish is passed under
every name that the template reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

# Variables that switch thinking on and off, with their values for on and off.
_SWITCHES: Mapping[str, tuple[object, object]] = {
    "enable_thinking": (True, False),
    "thinking": (True, False),
    "reasoning": (True, False),
    "thinking_mode": ("enabled", "disabled"),
    "thinking_option": ("on", "off"),
    "thinking_budget": (-1, 0),
}
_EFFORT = "reasoning_effort"
# `_EFFORTS` are variables for the amount of thinking, `_LEVELS` their values, from none to the
# maximum.
_EFFORTS = (_EFFORT, "thinking_effort", "reasoning_strength")
_LEVELS = ("no_think", "none", "minimal", "low", "medium", "high", "xhigh", "max")
_OFF = frozenset({"no_think", "none"})


def fit_thinking(
    given: Mapping[str, Any], reads: Collection[str], takes: Callable[[str, str], bool]
) -> Mapping[str, Any]:
    """Add the template's own variables, set to the requested thinking.

    `reads` are the template's variables; `takes` tells whether it knows a variable's value.
    """
    wanted, effort = _switch(given), given.get(_EFFORT)
    if wanted is None and not isinstance(effort, str):
        return given
    fitted = dict(given)
    if wanted is not None:
        fitted |= {
            name: on if wanted else off
            for name, (on, off) in _SWITCHES.items()
            if name in reads and name not in given
        }
    if wanted is False and not any(name in reads for name in _SWITCHES):
        effort = "none"
    for name in _EFFORTS:
        if name in reads and isinstance(effort, str):
            said = effort if name == _EFFORT else given.get(name, effort)
            fitted[name] = _level(said, name, takes)
    return fitted


def _switch(given: Mapping[str, Any]) -> bool | None:
    """Tell whether the request wants thinking; None if it does not say."""
    values = [given[name] for name in ("enable_thinking", "thinking") if name in given]
    said = next((value for value in values if isinstance(value, bool)), None)
    return False if said is None and given.get(_EFFORT) in _OFF else said


def _level(wanted: Any, name: str, takes: Callable[[str, str], bool]) -> Any:
    """Return the template's level nearest to the wanted one, or the wanted one if it knows none."""
    if wanted not in _LEVELS:
        return wanted
    if wanted in _OFF:
        tried = [wanted, *_LEVELS]
    else:
        place = _LEVELS.index(wanted)
        tried = sorted(_LEVELS, key=lambda level: abs(_LEVELS.index(level) - place))
    return next((level for level in tried if takes(name, level)), wanted)
