"""The command `triton-diffusion`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from triton_diffusion import __version__
from triton_diffusion.embedded import TritonNotFoundError, TritonServer, TritonServerError
from triton_diffusion.errors import InvalidRequestError
from triton_diffusion_client.cli import generate
from triton_diffusion_client.errors import DiffusionClientError

app = typer.Typer(
    help="Serve diffusion models on Triton Inference Server, and use them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(generate)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"triton-diffusion {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of the command itself."""


@app.command()
def serve(
    model_repository: Annotated[Path, typer.Argument(help="Triton model repository.")] = Path("model_repository"),
    host: Annotated[str, typer.Option(help="Address to bind; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="0 takes a free port.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="0 takes a free port.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="0 takes a free port.")] = 8002,
    exit_timeout: Annotated[float, typer.Option(help="Seconds for running requests to finish at the end.")] = 30.0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show warnings and errors of Triton's log only.")] = False,
) -> None:
    """Run Triton on a model repository until Ctrl-C or SIGTERM."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)

    def show(line: str) -> None:
        if not quiet or line.startswith(("W", "E", "F")):
            console.print(line, markup=False)

    server = TritonServer(
        model_repository,
        host=host,
        http_port=http_port or None,
        grpc_port=grpc_port or None,
        metrics_port=metrics_port or None,
        exit_timeout=exit_timeout,
        on_log_line=show,
    )
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        server.start()
        with console.status("starting Triton") as status:
            server.wait_until_ready(on_wait=lambda seconds: status.update(f"loading models: {seconds:.0f} s"))
        console.print(f"ready: gRPC {server.grpc_url}, HTTP {server.http_url}, metrics {server.metrics_url}/metrics")
        raise TritonServerError(server.wait())
    except KeyboardInterrupt:
        console.print("stopping; running requests may finish (Ctrl-C again ends them)")
    except (TritonServerError, TritonNotFoundError) as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(1) from None
    finally:
        try:
            server.stop()
        except KeyboardInterrupt:
            server.kill()


def _interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise KeyboardInterrupt


def main() -> None:
    """The entry point: wrong options are one line, not a traceback."""
    try:
        app()
    except (InvalidRequestError, DiffusionClientError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
