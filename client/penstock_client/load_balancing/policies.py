"""The policies by name."""

from __future__ import annotations

from penstock_client.load_balancing.base import Policy
from penstock_client.load_balancing.least_load import LeastLoad
from penstock_client.load_balancing.prefix_affinity import PrefixAffinity
from penstock_client.load_balancing.round_robin import RoundRobin
from penstock_client.load_balancing.session_affinity import SessionAffinity

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (LeastLoad, RoundRobin, PrefixAffinity, SessionAffinity)
}
DEFAULT_POLICY = LeastLoad.name


def make_policy(name: str) -> Policy:
    """A policy of its own memory. Raises `ValueError` for a name that is not in `POLICIES`."""
    if name not in POLICIES:
        raise ValueError(f"policy: {name!r} is not one of {', '.join(POLICIES)}")
    return POLICIES[name]()
