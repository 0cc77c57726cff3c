"""`pipeline_class`: the example of the documentation, and what is said of classes that cannot be served."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.fakes import RecordedReply
from tests.example_requests import mixed_requests, stock_call
from tests.tiny_pipelines import stable_diffusion_3
from triton_diffusion.adapters import StockAdapter, load_adapter
from triton_diffusion.config import EngineConfig
from triton_diffusion.errors import ConfigurationError, PipelineOutputError
from triton_diffusion.serving import build_engine

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "your-own-class.md"

CLASSES = """
from diffusers import StableDiffusion3Pipeline
from triton_diffusion.adapters import PipelineAdapter, StepwiseAdapter


class Neither(StableDiffusion3Pipeline):
    pass


class WrongReturn(PipelineAdapter):
    supports_request_batch = True

    def forward(self, batch):
        return "pictures"


class NoForward(PipelineAdapter):
    pass


class HalfStepwise(StepwiseAdapter):
    def prepare_encode(self, request):
        raise NotImplementedError


class Unrelated:
    pass
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    stable_diffusion_3().save_pretrained(path)
    return path


@pytest.fixture
def config(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the configuration for a class of the documentation, or of CLASSES above."""
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENTATION.read_text(), re.DOTALL)
    (tmp_path / "documented.py").write_text(code)
    (tmp_path / "classes.py").write_text(CLASSES)
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("documented", "classes"):
        sys.modules.pop(module, None)
    return lambda path: EngineConfig(model=str(checkpoint), max_num_seqs=8, pipeline_class=path)


def run(adapter: Any, count: int, **common: Any) -> list[RecordedReply]:
    requests = mixed_requests(count, **common)
    for request in requests:
        request.sampling_params = request.sampling_params.with_defaults(adapter.defaults)
    replies = [RecordedReply() for _ in requests]
    engine = build_engine(adapter, adapter.config)
    engine.add_requests(list(zip(requests, replies, strict=True)))
    while engine.progress():
        engine.step()
    engine.shutdown()
    return replies


def test_the_documented_class_fuses_requests_in_under_sixty_lines(config: Any) -> None:
    adapter = load_adapter(config("documented:OneStockCall"))
    common = {"num_inference_steps": 4, "guidance_scale": 5.0}
    replies = run(adapter, 4, **common)
    for request, reply in zip(mixed_requests(4, **common), replies, strict=True):
        pictures = np.stack([np.asarray(image) for image in stock_call(adapter.pipeline, request, "pil")])
        assert np.abs(reply.wait().output.astype(int) - pictures).max() <= 1
        assert reply.receipt is not None
        assert reply.receipt.wave_size == 4
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENTATION.read_text(), re.DOTALL)
    assert len(code.splitlines()) < 60


def test_a_pipeline_class_of_ones_own_runs_through_its_call(config: Any) -> None:
    adapter = load_adapter(config("classes:Neither"))
    assert isinstance(adapter, StockAdapter)
    assert adapter.name == "Neither"
    (reply,) = run(adapter, 1)
    assert reply.wait().output.shape == (1, 32, 32, 3)


def test_a_wrong_return_answers_every_request_and_names_the_class(config: Any) -> None:
    for reply in run(load_adapter(config("classes:WrongReturn")), 3):
        assert isinstance(reply.wait(), PipelineOutputError)
        assert str(reply.wait()).startswith("WrongReturn.forward must return a list of 3 DiffusionOutput")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "classes:Missing",
            "pipeline_class='classes:Missing': .*has no attribute 'Missing'; write package",
        ),
        ("nowhere.module:Class", "pipeline_class='nowhere.module:Class': No module named 'nowhere'"),
        ("classes", "pipeline_class='classes': "),
        ("classes:Unrelated", "must be a subclass of PipelineAdapter, StepwiseAdapter or diffusers.DiffusionPipeline"),
        ("classes:NoForward", "has no forward"),
        ("classes:HalfStepwise", "has no predict"),
    ],
)
def test_a_class_that_cannot_be_served_is_explained(config: Any, path: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_adapter(config(path))
