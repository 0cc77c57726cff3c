"""A pipeline that cannot be fused, and a configuration that wants waves of several requests."""

from __future__ import annotations

import logging

import pytest

from tests.tiny_pipelines import pixart_alpha
from triton_diffusion.adapters.loading import adapter_for
from triton_diffusion.config import EngineConfig
from triton_diffusion.errors import ConfigurationError
from triton_diffusion.serving import build_engine


def test_it_is_said_in_one_line_and_its_requests_run_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(model="tiny", max_num_seqs=4)
    with caplog.at_level(logging.WARNING, "triton_diffusion.serving"):
        engine = build_engine(adapter_for(pixart_alpha(), config), config)
    assert [record.getMessage() for record in caplog.records if record.name == "triton_diffusion.serving"] == [
        "max_num_seqs is 4, but PixArtAlphaPipeline runs one request at a time"
    ]
    assert engine.scheduler.max_num_running_reqs == 1
    engine.shutdown()


def test_require_batching_makes_it_an_error() -> None:
    config = EngineConfig(model="tiny", max_num_seqs=4, require_batching=True)
    message = "require_batching: max_num_seqs is 4, but PixArtAlphaPipeline runs one .*set max_batch_size to 1"
    with pytest.raises(ConfigurationError, match=message):
        build_engine(adapter_for(pixart_alpha(), config), config)


def test_require_batching_asks_for_nothing_where_one_request_is_all() -> None:
    config = EngineConfig(model="tiny", require_batching=True)
    build_engine(adapter_for(pixart_alpha(), config), config).shutdown()
