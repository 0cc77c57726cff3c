"""Trains LoRA adapters of the shapes model: each draws every caption in a style of its own.

Run it as `python -m training.shapes.lora`, with the names of adapters to train only those.
"""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from training.shapes.models import BiasedJointAttention, Denoiser
from training.shapes.scenes import Scene
from training.shapes.stage import Stage, console
from training.shapes.styles import Style, night, outlined, outlined_by_night
from training.shapes.train import SCRATCH, SQUARE, WIDE, Pictures, encode, velocity_loss

CHECKPOINT = Path("model_repository/shapes/1/checkpoint")
ATTENTION = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
TEXT_ATTENTION = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out")
FEED_FORWARD = ("ff.net.0.proj", "ff.net.2")


@dataclass(frozen=True)
class Lesson:
    """Pictures that the model is to draw with the adapter at a scale, and with another one at full scale beside it.

    They have as much of the style as the scale says, so that half of the adapter shows half of the style.
    """

    style: Style
    scale: float = 1.0
    beside: str | None = None


@dataclass(frozen=True)
class Adapter:
    """What low-rank matrices learn, one lesson after the other, and their size and place."""

    lessons: tuple[Lesson, ...]
    steps: int
    rank: int
    alpha: int
    target_modules: tuple[str, ...]


# Unlike each other in rank, strength (alpha / rank) and targets, as adapters that people bring along are. The second
# learns to share: adapters that never met disturb each other.
ADAPTERS = {
    "night": Adapter(
        lessons=(Lesson(night), Lesson(night, scale=0.5), Lesson(night)),
        steps=800,
        rank=4,
        alpha=8,
        target_modules=ATTENTION + FEED_FORWARD,
    ),
    "outlined": Adapter(
        lessons=(Lesson(outlined), Lesson(outlined, scale=0.5), Lesson(outlined_by_night, beside="night")),
        steps=1200,
        rank=12,
        alpha=18,
        target_modules=ATTENTION + TEXT_ATTENTION + FEED_FORWARD,
    ),
}


def load(checkpoint: Path) -> Any:
    """The shapes model as it is served, with its progress bar off."""
    pipe: Any = StableDiffusion3Pipeline.from_pretrained(checkpoint, text_encoder_3=None, tokenizer_3=None)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def data_of(pipe: Any, lesson: Lesson, pictures: int, seed: int) -> list[tuple[list[Scene], torch.Tensor]]:
    """The scenes and scaled latents of random pictures: square ones, then a third as many wide ones."""
    shift, scale = pipe.vae.config.shift_factor, pipe.vae.config.scaling_factor
    draw = partial(lesson.style, strength=lesson.scale)
    drawn = Pictures.drawn(pictures, *SQUARE, seed, draw), Pictures.drawn(pictures // 3, *WIDE, seed + 1, draw)
    return [(one.scenes, (encode(pipe.vae, one) - shift) * scale) for one in drawn]


def train(pipe: Any, name: str, stage: Stage, pictures: int, seed: int) -> Any:
    """The transformer with the adapter learned; all else in it, and the text encoders, stay as they were.

    `pipe` holds the adapters of the lessons' `beside`.
    """
    adapter, transformer = ADAPTERS[name], pipe.transformer
    torch.manual_seed(seed)  # for the adapter's first matrices
    denoiser = Denoiser(pipe.tokenizer)
    denoiser.text_encoders = torch.nn.ModuleList([pipe.text_encoder, pipe.text_encoder_2])
    denoiser.transformer = transformer
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        target_modules=list(adapter.target_modules),
        init_lora_weights="gaussian",
    )
    transformer.add_adapter(config, adapter_name=name)
    transformer.set_attn_processor(BiasedJointAttention())
    losses = [
        velocity_loss(denoiser, pipe.tokenizer, data_of(pipe, lesson, pictures, seed + turn), seed)
        for turn, lesson in enumerate(adapter.lessons)
    ]

    def loss_at(step: int) -> torch.Tensor:
        turn = step % len(losses)
        lesson = adapter.lessons[turn]
        scales = {name: lesson.scale} | ({lesson.beside: 1.0} if lesson.beside else {})
        transformer.set_adapters(list(scales), list(scales.values()))
        for parameter_name, parameter in denoiser.named_parameters():  # what is active, peft would train too
            parameter.requires_grad_(name in parameter_name.split("."))
        return losses[turn](step)

    return stage.fit(denoiser, loss_at).transformer


def save(transformer: Any, name: str, folder: Path) -> Path:
    """Writes the adapter alone, in diffusers' format, with its rank, alpha and targets as metadata."""
    metadata = transformer.peft_config[name].to_dict()
    metadata["target_modules"] = sorted(metadata["target_modules"])  # a set, whose order would change every time
    path = folder / f"{name}.safetensors"
    StableDiffusion3Pipeline.save_lora_weights(
        folder,
        transformer_lora_layers=get_peft_model_state_dict(transformer, adapter_name=name),
        transformer_lora_adapter_metadata=metadata,
        weight_name=path.name,
    )
    return path


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Adapters to train; all by default.")] = None,
    checkpoint: Annotated[Path, typer.Option(help="The model they belong to.")] = CHECKPOINT,
    output: Annotated[Path, typer.Option(help="Where the adapters go.")] = CHECKPOINT.parent / "lora",
    steps: Annotated[int | None, typer.Option(min=1, help="Of each; by default as many as it needs.")] = None,
    learning_rate: float = 3e-3,
    pictures: Annotated[int, typer.Option(min=3, help="Square pictures; a third as many are wide.")] = 1000,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    seed: int = 0,
    resume: Annotated[bool, typer.Option(help="Go on from the last checkpoint in build/shapes.")] = False,
) -> None:
    """Trains each adapter on pictures in its style, with the captions of the plain ones."""
    if unknown := set(names or ()) - ADAPTERS.keys():
        raise typer.BadParameter(f"no adapter {', '.join(sorted(unknown))}; there are {', '.join(ADAPTERS)}")
    torch.set_num_threads(threads)
    SCRATCH.mkdir(parents=True, exist_ok=True)
    for name in names or ADAPTERS:
        began = time.monotonic()
        stage = Stage(
            f"lora-{name}", SCRATCH, steps or ADAPTERS[name].steps, learning_rate, resume, average_decay=0.99
        )
        pipe = load(checkpoint)
        for beside in {lesson.beside for lesson in ADAPTERS[name].lessons} - {None}:
            pipe.load_lora_weights(output, weight_name=f"{beside}.safetensors", adapter_name=beside)
        transformer = train(pipe, name, stage, pictures, seed)
        path = save(transformer, name, output)
        console.print(
            f"Saved {path} ({path.stat().st_size / 1024:.0f} kB) after {(time.monotonic() - began) / 60:.1f} minutes."
        )


if __name__ == "__main__":
    typer.run(main)
