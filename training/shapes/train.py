"""Trains the shapes model: the autoencoder, the denoiser on its latents, and the decoder once more.

Run it as `python -m training.shapes.train --output model_repository/shapes/1/checkpoint`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import numpy as np
import torch
import typer
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPTokenizer

from training.shapes.models import TOKENS, Denoiser, autoencoder, pipeline, word_tokenizer
from training.shapes.scenes import OPENINGS, Scene, draw, every_scene, random_caption, random_scene, sheet
from training.shapes.stage import Stage, console

SCRATCH = Path("build/shapes")
SQUARE, WIDE = (64, 64), (64, 96)  # height x width in pixels
WIDE_SHARE = 0.25
EMPTY_TOKENS = 256  # the pipeline's default max_sequence_length
SAMPLE_STEPS = 1000


@dataclass
class Pictures:
    """Drawn scenes of one size: `pixels` of shape (N, 3, H, W) in [-1, 1]."""

    scenes: list[Scene]
    pixels: Tensor

    @classmethod
    def drawn(
        cls, count: int, height: int, width: int, seed: int, draw: Callable[..., Image.Image] = draw
    ) -> "Pictures":
        """`count` random scenes, drawn by a function like `scenes.draw`."""
        random = Random(seed)
        scenes = [random_scene(random) for _ in range(count)]
        arrays = np.stack([np.asarray(draw(scene, random, height, width)) for scene in scenes])
        return cls(scenes, torch.from_numpy(arrays).permute(0, 3, 1, 2).float() / 127.5 - 1)


def generator_at(step: int, seed: int) -> torch.Generator:
    """The source of one step's randomness."""
    return torch.Generator().manual_seed(seed * 10_000_019 + step)


def train_autoencoder(stage: Stage, pictures: Pictures, seed: int) -> Any:
    """Learns to reconstruct the pictures; the slight divergence term keeps the latents smooth."""
    vae = autoencoder().to(memory_format=torch.channels_last)

    def loss_at(step: int) -> Tensor:
        generator = generator_at(step, seed)
        chosen = torch.randint(len(pictures.scenes), (16,), generator=generator)
        pixels = pictures.pixels[chosen].contiguous(memory_format=torch.channels_last)
        posterior = vae.encode(pixels).latent_dist
        restored = vae.decode(posterior.sample(generator)).sample
        error = functional.l1_loss(restored, pixels) + functional.mse_loss(restored, pixels)
        divergence: Tensor = posterior.kl().mean()
        return error + 1e-6 * divergence

    return stage.fit(vae, loss_at)


@torch.no_grad()
def encode(vae: Any, pictures: Pictures) -> Tensor:
    """Latents of shape (N, 8, H/4, W/4), not yet scaled."""
    return torch.cat([vae.encode(pixels).latent_dist.mean for pixels in torch.split(pictures.pixels, 64)])


def train_decoder(
    stage: Stage,
    decoder: nn.Module,
    data: list[tuple[Tensor, Tensor]],
    seed: int,
) -> nn.Module:
    """Sharpens the decoder alone, which leaves the latents as they are.

    `data` holds the latents (not scaled) and the pixels of the square pictures, then of the wide ones.
    """

    def loss_at(step: int) -> Tensor:
        generator = generator_at(step, seed)
        latents, pixels = data[Random(step).random() < WIDE_SHARE]
        chosen = torch.randint(len(pixels), (16,), generator=generator)
        clean = latents[chosen].contiguous(memory_format=torch.channels_last)
        # The latents it will meet are the denoiser's, which are not quite clean either.
        noise = 0.1 * torch.randn(clean.shape, generator=generator)
        restored = decoder(clean + noise)
        return functional.l1_loss(restored, pixels[chosen]) + functional.mse_loss(restored, pixels[chosen])

    return stage.fit(decoder, loss_at)


def velocity_loss(
    denoiser: Denoiser, tokenizer: CLIPTokenizer, data: list[tuple[list[Scene], Tensor]], seed: int
) -> Callable[[int], Tensor]:
    """The loss of each step: how far the denoiser is from the velocity from latents to noise (rectified flow).

    `data` holds the scenes and scaled latents of the square pictures, then of the wide ones.
    """

    def loss_at(step: int) -> Tensor:
        generator, random = generator_at(step, seed), Random(seed * 10_000_019 + step)
        scenes, latents = data[random.random() < WIDE_SHARE]
        chosen = torch.randint(len(scenes), (32,), generator=generator)
        captions = [random_caption(scenes[index], random) for index in chosen]
        tokens = tokenizer(captions, padding="max_length", max_length=TOKENS, return_tensors="pt").input_ids
        # Half the steps at the pipeline's default; the others let users shorten it, which is much faster.
        empty = EMPTY_TOKENS if random.random() < 0.5 else round(2 ** random.uniform(3, 9))

        clean = latents[chosen]
        noise = torch.randn(clean.shape, generator=generator)
        # Logit-normal; its mean favours high noise, where position and outline are decided.
        noise_shares = (0.5 + torch.randn(len(chosen), generator=generator)).sigmoid()
        noisy = torch.lerp(clean, noise, noise_shares[:, None, None, None])
        velocity = denoiser(noisy, 1000 * noise_shares, tokens, empty)
        return functional.mse_loss(velocity, noise - clean)

    return loss_at


def save_samples(pipe: Any, path: Path) -> None:
    """Draws 16 square and 8 wide pictures onto one sheet."""
    random, pictures = Random(7), []
    pipe.set_progress_bar_config(disable=True)
    for count, (height, width) in ((16, SQUARE), (8, WIDE)):
        pictures += pipe(
            [random_scene(random).caption() for _ in range(count)],
            height=height,
            width=width,
            num_inference_steps=20,
            guidance_scale=4.0,
            generator=[torch.Generator().manual_seed(number) for number in range(count)],
        ).images
    sheet(pictures, columns=8).save(path)


def main(
    output: Annotated[Path, typer.Option(help="Where the pipeline goes.")] = Path(
        "model_repository/shapes/1/checkpoint"
    ),
    autoencoder_steps: Annotated[int, typer.Option(min=1)] = 1600,
    decoder_steps: Annotated[int, typer.Option(min=1)] = 1500,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the denoiser.")] = 9600,
    pictures: Annotated[int, typer.Option(min=1, help="Square pictures; a third as many are wide.")] = 9000,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    seed: int = 0,
    resume: Annotated[bool, typer.Option(help="Go on from the last checkpoint in build/shapes.")] = False,
) -> None:
    """Trains the model and saves it as a StableDiffusion3Pipeline; takes an hour on one core."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    SCRATCH.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()

    words = " ".join([*OPENINGS, *(scene.caption() for scene in every_scene())]).split()
    tokenizer = word_tokenizer(words)
    square = Pictures.drawn(pictures, *SQUARE, seed)
    wide = Pictures.drawn(pictures // 3, *WIDE, seed + 1)

    stage = Stage("autoencoder", SCRATCH, autoencoder_steps, 2e-3, resume, average_decay=0.99)
    vae = train_autoencoder(stage, square, seed)
    latents = [encode(vae, square), encode(vae, wide)]
    shift, scale = latents[0].mean().item(), 1 / latents[0].std().item()
    vae.register_to_config(shift_factor=shift, scaling_factor=scale)
    data = [(square.scenes, (latents[0] - shift) * scale), (wide.scenes, (latents[1] - shift) * scale)]

    def show(step: int, average: Denoiser) -> None:
        if step % SAMPLE_STEPS == 0:
            pipe = pipeline(tokenizer, vae, average)
            pipe.save_pretrained(SCRATCH / "pipeline")
            save_samples(pipe, SCRATCH / f"step-{step}.png")

    stage = Stage("denoiser", SCRATCH, steps, 2e-3, resume)
    denoiser = Denoiser(tokenizer)
    denoiser = stage.fit(denoiser, velocity_loss(denoiser, tokenizer, data, seed), show)

    pairs = [(latents[0], square.pixels), (latents[1], wide.pixels)]
    stage = Stage("decoder", SCRATCH, decoder_steps, 1e-3, resume, average_decay=0.99)
    vae.decoder = train_decoder(stage, vae.decoder.requires_grad_(), pairs, seed)

    # A fresh tokenizer, because the used one would be saved with the padding of its last call.
    pipe = pipeline(word_tokenizer(words), vae, denoiser)
    pipe.save_pretrained(output)
    save_samples(pipe, SCRATCH / "final.png")
    console.print(f"Saved {output} after {(time.monotonic() - began) / 60:.1f} minutes.")


if __name__ == "__main__":
    typer.run(main)
