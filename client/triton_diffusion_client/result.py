"""The result of one request."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import PIL.Image
from PIL.PngImagePlugin import PngInfo
from triton_diffusion.receipt import Receipt

from triton_diffusion_client.errors import DiffusionClientError


@dataclass(kw_only=True)
class GenerationResult:
    """Pictures of one prompt, or the error that kept it from having any.

    Args:
        prompt: as it was sent.
        images: one for each image of the request.
        videos: the frames of each video, for pipelines that make videos.
        seeds: the seed of each; sending it again gives the same picture.
        receipt: what happened to the request in the server.
        error: set when there are no pictures.
    """

    prompt: str
    negative_prompt: str | None = None
    images: list[PIL.Image.Image] = field(default_factory=list)
    videos: list[list[PIL.Image.Image]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    receipt: Receipt | None = None
    error: DiffusionClientError | None = None

    def raise_for_error(self) -> GenerationResult:
        """This result, if it holds pictures.

        Raises:
            DiffusionClientError: the request's own error.
        """
        if self.error is not None:
            raise self.error
        return self

    def save(self, directory: Path | str, stem: str = "") -> list[Path]:
        """Write the pictures as PNG files that hold prompt, seed and parameters, and videos as animated WebP.

        Args:
            directory: made if it is not there.
            stem: begins the file names; the prompt's first words by default.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        stem = stem or file_stem(self.prompt)
        paths = []
        for image, seed in zip(self.images, self.seeds, strict=False):
            paths.append(directory / f"{stem}-seed{seed}.png")
            image.save(paths[-1], pnginfo=self._metadata(seed))
        for frames, seed in zip(self.videos, self.seeds, strict=False):
            paths.append(directory / f"{stem}-seed{seed}.webp")
            frames[0].save(paths[-1], save_all=True, append_images=frames[1:], duration=1000 / 16)
        return paths

    def _metadata(self, seed: int) -> PngInfo:
        parameters = {} if self.receipt is None else self.receipt.sampling_params.given()
        metadata = PngInfo()
        metadata.add_itxt("prompt", self.prompt)
        if self.negative_prompt:
            metadata.add_itxt("negative_prompt", self.negative_prompt)
        metadata.add_text("seed", str(seed))
        # The seed of this very image, so that the parameters alone make it again.
        metadata.add_text("parameters", json.dumps({**parameters, "seed": seed, "num_images_per_prompt": 1}))
        return metadata


def file_stem(prompt: str, limit: int = 40) -> str:
    """The first words of a prompt as a file name: `a-large-red-circle`."""
    words = re.sub(r"[^\w]+", "-", prompt.lower()).strip("-")
    return (words[:limit].rsplit("-", 1)[0] if len(words) > limit else words) or "image"
