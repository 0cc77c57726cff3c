"""The command `triton-diffusion`."""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from triton_diffusion import __version__
from triton_diffusion.deployment.command_line import with_model_options
from triton_diffusion.deployment.existing import (
    DEFAULT_REPOSITORY,
    existing_repository,
    refuse_options,
    refuse_other_models,
)
from triton_diffusion.deployment.plan import plan_models
from triton_diffusion.deployment.repository import check_can_write, repository_files, show_files, write_repository
from triton_diffusion.embedded import TritonNotFoundError, TritonServer, TritonServerError
from triton_diffusion.embedded.server_options import ServerOptions
from triton_diffusion.errors import ConfigurationError, InvalidRequestError
from triton_diffusion_client.cli import generate
from triton_diffusion_client.errors import DiffusionClientError
from triton_diffusion_client.health import health

app = typer.Typer(
    help="Serve diffusion models on Triton Inference Server, and use them.",
    no_args_is_help=True,
    rich_markup_mode=None,  # its tables cut the names of options where the terminal is narrow
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(health)

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="Deploy file: YAML, vLLM-Omni's stage_args or flat; the command line wins over it.",
        show_default=False,
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Write over a model folder that is there already.")]


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
@with_model_options
def serve(
    given: dict[str, object],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A directory saved by save_pretrained, a hub id, or a Triton model repository.",
            show_default=str(DEFAULT_REPOSITORY),
        ),
    ] = None,
    named_models: Annotated[
        list[str] | None, typer.Option("--model", help="NAME=MODEL; once for each of several models.")
    ] = None,
    config: ConfigFile = None,
    repository: Annotated[
        Path | None, typer.Option(help="Keep the model repository that is written here.", show_default="temporary")
    ] = None,
    force: Force = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the files that would be served, and start nothing.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address to bind; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="0 takes a free port.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="0 takes a free port.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="0 takes a free port.")] = 8002,
    triton_options: Annotated[
        list[str] | None,
        typer.Option(
            "--triton-option",
            metavar="NAME=VALUE",
            help="An option of tritonserver: trace-config=rate=1; once for each of several.",
        ),
    ] = None,
    exit_timeout: Annotated[float, typer.Option(help="Seconds for running requests to finish at the end.")] = 30.0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show warnings and errors of Triton's log only.")] = False,
) -> None:
    """Serve models on Triton until Ctrl-C or SIGTERM."""
    server_options = ServerOptions(
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        exit_timeout=exit_timeout,
        triton_options=triton_options or (),
        quiet=quiet,
    )
    existing = existing_repository(model, wanted_else=bool(named_models or config))
    if existing is not None:
        refuse_options(existing, given, model=named_models, config=config, repository=repository, force=force)
        if dry_run:
            show_files({path: path.read_text() for path in sorted(existing.glob("*/config.pbtxt"))})
        else:
            _run_server(existing, server_options)
        return
    models = plan_models(model, named_models or [], config, given, _warn)
    if repository is not None:
        refuse_other_models(repository, models)
    if dry_run:
        files = repository_files(models)
        check_can_write(repository or Path(), files, force=force or repository is None)
        show_files({(repository or Path()) / path: text for path, text in files.items()})
        return
    with ExitStack() as stack:
        if repository is None:
            repository = Path(stack.enter_context(TemporaryDirectory(prefix="triton-diffusion-models-")))
        write_repository(repository, models, force=force)
        _run_server(repository, server_options)


@app.command()
@with_model_options
def init(
    given: dict[str, object],
    directory: Annotated[Path, typer.Argument(help="Folder for the model repository.", show_default=False)],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="A directory saved by save_pretrained, or a hub id.", show_default=False
        ),
    ] = None,
    named_models: Annotated[
        list[str] | None, typer.Option("--model", help="NAME=MODEL; once for each of several models.")
    ] = None,
    config: ConfigFile = None,
    force: Force = False,
) -> None:
    """Write a Triton model repository, for a tritonserver of your own."""
    for path in write_repository(directory, plan_models(model, named_models or [], config, given, _warn), force=force):
        typer.echo(path)


def _warn(text: str) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"warning: {text}", style="yellow", markup=False)


def _run_server(model_repository: Path, options: ServerOptions) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)

    def show(line: str) -> None:
        if not options.quiet or line.startswith(("W", "E", "F")):
            console.print(line, markup=False)

    server = TritonServer(
        model_repository,
        host=options.host,
        http_port=options.http_port,
        grpc_port=options.grpc_port,
        metrics_port=options.metrics_port,
        exit_timeout=options.exit_timeout,
        on_log_line=show,
        arguments=options.arguments,
    )
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        server.start()
        with console.status("starting Triton") as status:
            # A checkpoint may have to be downloaded first, which takes as long as it takes.
            server.wait_until_ready(None, on_wait=lambda seconds: status.update(f"loading models: {seconds:.0f} s"))
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
    except (ConfigurationError, InvalidRequestError, DiffusionClientError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
