"""docs/reference.md is what the code says."""

from __future__ import annotations

from pathlib import Path

from triton_diffusion.reference import render


def test_the_reference_is_up_to_date() -> None:
    written = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
    assert written == render(), "run `make docs`"
