"""What holds for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long an example takes says more of the machine than of the code.
settings.register_profile(
    "any machine", suppress_health_check=[HealthCheck.too_slow], deadline=None
)
settings.load_profile("any machine")
