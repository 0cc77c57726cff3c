"""What tests of the engine share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.testing import CompileCounter


@pytest.fixture
def compile_counter() -> Iterator[CompileCounter]:
    """A backend of torch.compile that counts the graphs it is given."""
    torch._dynamo.reset()
    yield CompileCounter()
    torch._dynamo.reset()
