"""Where tritonserver and its Python backend are on this machine."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

CONTAINER_ROOT = Path("/opt/tritonserver")
STUB = "triton_python_backend_stub"


class TritonNotFoundError(RuntimeError):
    """No usable tritonserver on this machine; the message says what to install."""


@dataclass(frozen=True)
class TritonInstallation:
    """A tritonserver binary, its Python backend, the stub of the running Python and the libraries they load."""

    executable: Path
    python_backend: Path
    stub: Path
    library_directories: tuple[Path, ...]

    @classmethod
    def find(cls) -> TritonInstallation:
        """The container's server (`TRITONSERVER_ROOT`, default /opt/tritonserver), else that of `nvidia-pytriton`.

        Raises:
            TritonNotFoundError: neither is there, or it has no stub for the running Python.
        """
        root = Path(os.environ.get("TRITONSERVER_ROOT", CONTAINER_ROOT))
        if (root / "bin" / "tritonserver").is_file():
            return cls._from_container(root)
        if importlib.util.find_spec("pytriton") is not None:
            return cls._from_wheel()
        raise TritonNotFoundError(
            f"tritonserver was not found: neither in {root} nor as the Python package nvidia-pytriton. "
            "Run inside the tritonserver container, or: pip install 'triton-diffusion[embedded]'"
        )

    @classmethod
    def _from_container(cls, root: Path) -> TritonInstallation:
        python_backend = root / "backends" / "python"
        return cls(root / "bin" / "tritonserver", python_backend, python_backend / STUB, (root / "lib",))

    @classmethod
    def _from_wheel(cls) -> TritonInstallation:
        spec = importlib.util.find_spec("pytriton")
        assert spec is not None
        assert spec.submodule_search_locations is not None
        package = Path(spec.submodule_search_locations[0])
        root = package / "tritonserver"
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        stub = root / "python_backend_stubs" / version / STUB
        if not stub.is_file():
            available = ", ".join(sorted(entry.name for entry in stub.parent.parent.iterdir()))
            raise TritonNotFoundError(
                f"nvidia-pytriton has no Python backend stub for Python {version}; it has: {available}"
            )
        return cls(
            root / "bin" / "tritonserver",
            root / "backends" / "python",
            stub,
            (package.parent / "nvidia_pytriton.libs", _shared_python_library().parent),
        )

    def link_backend_directory(self, directory: Path) -> None:
        """Fill `directory` with the Python backend and the stub of the running Python.

        Triton looks for the stub beside the backend's library, where the wheel does not put it.
        """
        target = directory / "python"
        target.mkdir(parents=True)
        for entry in self.python_backend.iterdir():
            if entry.name not in ("__pycache__", STUB):
                (target / entry.name).symlink_to(entry)
        (target / STUB).symlink_to(self.stub)

    def environment(self) -> dict[str, str]:
        """The environment for the server, in which the stub imports what the running Python imports.

        Some stubs embed an isolated interpreter, which ignores PYTHONPATH but finds its virtual environment
        by the first `python3` in PATH; others do the reverse. Both are set.
        """
        own_sources = Path(__file__).resolve().parents[2]
        return {
            **os.environ,
            "PATH": _joined(Path(sys.executable).parent, os.environ.get("PATH", "")),
            "PYTHONPATH": _joined(own_sources, *sys.path),
            "LD_LIBRARY_PATH": _joined(*self.library_directories, os.environ.get("LD_LIBRARY_PATH", "")),
        }


def _joined(*entries: Path | str) -> str:
    return os.pathsep.join(dict.fromkeys(str(entry) for entry in entries if str(entry)))


def _shared_python_library() -> Path:
    """The libpython that the stub is linked against; an interpreter built static has none of its own."""
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    directories = [Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib")]
    directories += [Path("/usr/lib") / (sysconfig.get_config_var("MULTIARCH") or ""), Path("/usr/lib64")]
    for directory in directories:
        if (directory / name).exists():
            return directory / name
    raise TritonNotFoundError(
        f"{name} was not found in {', '.join(map(str, directories))}. This Python was built without a shared "
        f"library; install the distribution's (Debian, Ubuntu: apt-get install {name.split('.so')[0]})"
    )
