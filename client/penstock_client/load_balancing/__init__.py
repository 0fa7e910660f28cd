"""Which shard takes the next request. No I/O and no clock: a policy sees a snapshot and decides."""

from __future__ import annotations

from penstock_client.policies.base import Candidate, Decision, Policy, Reason
from penstock_client.policies.least_load import LeastLoad
from penstock_client.policies.prefix_affinity import PrefixAffinity
from penstock_client.policies.round_robin import RoundRobin
from penstock_client.policies.session import SessionAffinity

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (LeastLoad, RoundRobin, PrefixAffinity, SessionAffinity)
}
DEFAULT_POLICY = LeastLoad.name

__all__ = ["DEFAULT_POLICY", "POLICIES", "Candidate", "Decision", "Policy", "Reason", "make_policy"]


def make_policy(name: str) -> Policy:
    """A policy of its own memory. Raises `ValueError` for a name that is not in `POLICIES`."""
    if name not in POLICIES:
        raise ValueError(f"policy: {name!r} is not one of {', '.join(POLICIES)}")
    return POLICIES[name]()
