"""Settings for all tests."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tiny tensors gain nothing from a second thread, and waiting for a busy core costs a lot. Servers inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says nothing on a loaded machine.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
