"""The policies by name."""

from __future__ import annotations

from penstock_client.load_balancing.base import DEFAULT_ALLOWANCE_S, Policy
from penstock_client.load_balancing.least_load import LeastLoad
from penstock_client.load_balancing.prefix_affinity import PrefixAffinity
from penstock_client.load_balancing.round_robin import RoundRobin
from penstock_client.load_balancing.session_affinity import SessionAffinity

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (LeastLoad, RoundRobin, PrefixAffinity, SessionAffinity)
}
DEFAULT_POLICY = LeastLoad.name


def make_policy(name: str, allowance_s: float = DEFAULT_ALLOWANCE_S) -> Policy:
    """Make a policy. A request waits at most `allowance_s` for other prompts at the shard that has
    its prefix. Raise `ValueError` for an unknown name.
    """
    if name not in POLICIES:
        raise ValueError(f"policy: {name!r} is not one of {', '.join(POLICIES)}")
    policy = POLICIES[name]
    if policy is PrefixAffinity or policy is SessionAffinity:
        return policy(allowance_s)
    return policy()
