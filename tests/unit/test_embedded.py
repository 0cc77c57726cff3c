"""Finding a tritonserver, and what is said when there is none."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from triton_diffusion.embedded import TritonInstallation, TritonNotFoundError, TritonServer, TritonServerError


def test_the_container_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tritonserver").touch()
    monkeypatch.setenv("TRITONSERVER_ROOT", str(tmp_path))
    assert TritonInstallation.find().executable == tmp_path / "bin" / "tritonserver"


def test_without_a_server_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONSERVER_ROOT", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(TritonNotFoundError, match=r"pip install 'triton-diffusion\[embedded\]'"):
        TritonInstallation.find()


def test_a_repository_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TritonServerError, match="nowhere is not a directory"), TritonServer(tmp_path / "nowhere"):
        pass
