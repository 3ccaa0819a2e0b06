"""Hypothesis does not judge how fast the machine is just now: other tests run beside these."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("operator", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("operator")
