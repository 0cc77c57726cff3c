"""`triton-diffusion generate`: pictures from the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from triton_diffusion.field import Field
from triton_diffusion.sampling_params import SAMPLING_FIELDS, SamplingParams
from triton_diffusion_client.client import DiffusionClient
from triton_diffusion_client.command_options import with_options
from triton_diffusion_client.prompt import Prompt
from triton_diffusion_client.result import GenerationResult, VideoFormat, file_stem

_TYPES: dict[str, type] = {"int": int, "float": float, "str": str}
_SHORT = {"num_inference_steps": "--steps", "num_images_per_prompt": "-n"}
_NOT_OFFERED = {"output_format"}  # files are always PNG: they hold the parameters


def with_sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a typer command an option for each sampling parameter, collected in its argument `sampling_values`."""
    options = {name: _option(declared) for name, declared in SAMPLING_FIELDS.items() if name not in _NOT_OFFERED}
    return with_options(command, "sampling_values", options)


def _option(declared: Field) -> Any:
    name = declared.name
    flags = [f"--{name.replace('_', '-')}", *([_SHORT[name]] if name in _SHORT else [])]
    option = typer.Option(*flags, help=declared.description, rich_help_panel="Sampling parameters", show_default=False)
    return Annotated[_TYPES[declared.kind] | None, option]


@with_sampling_options
def generate(
    prompts: Annotated[list[str], typer.Argument(help="Prompts; each is a request of its own.", show_default=False)],
    sampling_values: dict[str, object],
    out: Annotated[Path, typer.Option(help="Directory for the pictures.")] = Path("pictures"),
    url: Annotated[
        str, typer.Option(help="Server; http:// in front uses HTTP instead of gRPC.", envvar="TRITON_DIFFUSION_URL")
    ] = "localhost:8001",
    model: Annotated[str, typer.Option(help="Name of the served model.")] = "shapes",
    negative_prompt: Annotated[str | None, typer.Option(help="What to keep out of the pictures.")] = None,
    image: Annotated[Path | None, typer.Option(help="Input image of an image-conditioned pipeline.")] = None,
    priority: Annotated[
        int, typer.Option(help="Order among the waiting requests, -100 to 100; the smaller goes first.")
    ] = 0,
    video_format: Annotated[VideoFormat, typer.Option(help="File format of videos.")] = VideoFormat.WEBP,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds for one request; default: as long as it takes.")
    ] = None,
) -> None:
    """Generate pictures, and write them with their prompts, seeds and parameters inside."""
    console, errors = Console(soft_wrap=True, highlight=False), Console(stderr=True, soft_wrap=True, highlight=False)
    sampling_params = SamplingParams.parse(sampling_values)
    VideoFormat.usable(video_format)  # an error now, and not when the video is made
    requests = [_prompt(prompt, negative_prompt, image) for prompt in prompts]
    with DiffusionClient(url, model, timeout=timeout) as client:
        results = client.generate(requests, sampling_params, priority=priority)
    for position, result in enumerate(results):
        if result.error is not None:
            errors.print(f"[red]error[/red] {result.prompt!r}: ", end="")
            errors.print(str(result.error), markup=False)
            continue
        for path in result.save(out, stem=_stem(results, position), video_format=video_format):
            console.print(path, markup=False)
    if any(result.error is not None for result in results):
        raise typer.Exit(1)


def _prompt(prompt: str, negative_prompt: str | None, image: Path | None) -> Prompt:
    request: dict[str, object] = {"prompt": prompt}
    if negative_prompt is not None:
        request["negative_prompt"] = negative_prompt
    if image is not None:
        request["multi_modal_data"] = {"image": image}
    return request


def _stem(results: list[GenerationResult], position: int) -> str:
    """The prompt's first words; numbered when there are several prompts, so that equal ones keep their files."""
    words = file_stem(results[position].prompt)
    return words if len(results) == 1 else f"{position + 1:0{len(str(len(results)))}d}-{words}"
