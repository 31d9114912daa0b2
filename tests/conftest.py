from __future__ import annotations

# A machine that only runs the tests of its GPU may lack hypothesis, which these tests do not use.
try:
    from hypothesis import HealthCheck, settings
except ImportError:
    pass
else:
    # How long an example takes says how busy the machine is, not whether the code is right.
    settings.register_profile("meshwright", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("meshwright")
