from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("meshwright", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("meshwright")
