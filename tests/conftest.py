"""Settings for all tests."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tiny tensors gain nothing from a second thread, and waiting for a busy core costs a lot. Servers inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
