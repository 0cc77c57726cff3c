"""The result of one request."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from PIL.PngImagePlugin import PngInfo

from triton_diffusion.receipt import Receipt
from triton_diffusion_client.errors import DiffusionClientError, InvalidRequestError


class VideoFormat(StrEnum):
    """The file formats of videos."""

    WEBP = "webp"
    GIF = "gif"
    MP4 = "mp4"

    @classmethod
    def usable(cls, name: str) -> VideoFormat:
        """The format of that name.

        Raises:
            InvalidRequestError: there is none.
            DiffusionClientError: what writes it is not installed.
        """
        if name not in list(cls):
            raise InvalidRequestError(f"unknown video format {name!r}: use one of {', '.join(cls)}")
        if name == cls.MP4 and not (find_spec("imageio") and find_spec("imageio_ffmpeg")):
            raise DiffusionClientError(
                "mp4 needs imageio and imageio-ffmpeg: pip install 'triton-diffusion[video]', or use webp or gif"
            )
        return cls(name)


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

    def save(
        self, directory: Path | str, stem: str = "", *, video_format: str = VideoFormat.WEBP, fps: float = 16
    ) -> list[Path]:
        """Write the pictures as PNG files that hold prompt, seed and parameters, and the videos; overwrites nothing.

        Args:
            directory: made if it is not there.
            stem: begins the file names; the prompt's first words by default.
            video_format: `webp`, `gif` (which holds the prompt as its comment) or `mp4`.
            fps: frames of a video in a second; GIF rounds the time of a frame to hundredths of a second.

        Raises:
            DiffusionClientError: the video format is unknown, or what writes it is not installed.
        """
        video_format = VideoFormat.usable(video_format) if self.videos else video_format
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        stem = stem or file_stem(self.prompt)
        paths = []
        for image, seed in zip(self.images, self.seeds, strict=False):
            paths.append(_free(directory / f"{stem}-seed{seed}.png"))
            image.save(paths[-1], pnginfo=self._metadata(seed))
        for frames, seed in zip(self.videos, self.seeds, strict=False):
            paths.append(_free(directory / f"{stem}-seed{seed}.{video_format}"))
            if video_format == VideoFormat.MP4:
                _write_mp4(paths[-1], frames, fps)
            else:
                animation: dict[str, Any] = {"append_images": frames[1:], "duration": 1000 / fps, "loop": 0}
                if video_format == VideoFormat.GIF:
                    animation["comment"] = self.prompt.encode()
                frames[0].save(paths[-1], save_all=True, **animation)
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


def _free(path: Path) -> Path:
    """`path`, or with a number behind it if there is a file of that name already."""
    candidates = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
    return next(candidate for candidate in itertools.chain([path], candidates) if not candidate.exists())


def _write_mp4(path: Path, frames: list[PIL.Image.Image], fps: float) -> None:
    """H.264, whose sides are even: an odd one repeats its last row or column of pixels."""
    import imageio.v3  # optional

    pixels = np.stack([np.asarray(frame) for frame in frames])
    _, height, width, _ = pixels.shape
    pixels = np.pad(pixels, [(0, 0), (0, height % 2), (0, width % 2), (0, 0)], mode="edge")
    imageio.v3.imwrite(path, pixels, plugin="FFMPEG", fps=fps, quality=8, macro_block_size=1)


def file_stem(prompt: str, limit: int = 40) -> str:
    """The first words of a prompt as a file name: `a-large-red-circle`."""
    words = re.sub(r"[^\w]+", "-", prompt.lower()).strip("-")
    return (words[:limit].rsplit("-", 1)[0] if len(words) > limit else words) or "image"
