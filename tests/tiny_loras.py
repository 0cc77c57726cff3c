"""Real LoRA adapters with random weights for the tiny pipelines, written and read as diffusers does it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict

from triton_diffusion.lora import LoraSelection
from triton_diffusion.lora.files import DEFAULT_FILE

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
FEED_FORWARD = ("net.0.proj", "net.2")


def write_lora(
    pipeline: Any,
    folder: Path,
    *,
    rank: int,
    seed: int,
    targets: Sequence[str] = ATTENTION,
    text_encoder: bool = False,
    transformer_2: bool = False,
    file: str = DEFAULT_FILE,
    dropout: float = 0.0,
    alpha: int | None = None,
    **config: Any,
) -> Path:
    """Write an adapter for a pipeline into a folder; the pipeline itself is afterwards as it was.

    Args:
        targets: the layers of the transformer (or U-Net) that it changes, by the ends of their names; `all` means
            every linear layer.
        text_encoder: it changes the first text encoder too.
        transformer_2: it is for Wan 2.2's second transformer.
        dropout: of its training, noted in the file.
    """
    part = "unet" if hasattr(pipeline, "unet") else "transformer"
    transformer = pipeline.transformer_2 if transformer_2 else getattr(pipeline, part)
    layers = {part: _added(transformer, targets, rank, seed, alpha, config)}
    if text_encoder:
        encoder_targets = ("q_proj", "k_proj", "v_proj", "out_proj")
        layers["text_encoder"] = _added(pipeline.text_encoder, encoder_targets, rank, seed + 1, alpha, config)
    states: dict[str, Any] = {f"{name}_lora_layers": state for name, state in layers.items()}
    if dropout:
        states[f"{part}_lora_adapter_metadata"] = {
            "r": rank,
            "lora_alpha": alpha or rank,
            "lora_dropout": dropout,
            "target_modules": list(targets),
        }
    pipeline.save_lora_weights(folder, weight_name=file, **states)
    pipeline.unload_lora_weights()
    return folder


def _added(
    module: Any, targets: Sequence[str], rank: int, seed: int, alpha: int | None, config: dict[str, Any]
) -> dict[str, torch.Tensor]:
    linear = [name for name, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)]
    wanted = linear if targets == "all" else [name for name in linear if name.endswith(tuple(targets))]
    module.add_adapter(LoraConfig(r=rank, lora_alpha=alpha or rank, target_modules=wanted, **config), "made")
    generator = torch.Generator().manual_seed(seed)
    for layer in module.modules():
        if isinstance(layer, LoraLayer):
            for factor in (layer.lora_A, layer.lora_B):
                weight: Any = factor["made"].weight
                weight.data.copy_(0.1 * torch.randn(weight.shape, generator=generator))
    state: dict[str, torch.Tensor] = get_peft_model_state_dict(module, adapter_name="made")
    return state


def write_loras(build: Any, directory: Path, *, text_encoder: bool) -> list[str]:
    """Three adapters of different ranks and layers; their names.

    `ink` changes the attention, `night` the feed-forward layers, and `wide` every linear layer, and the text encoder
    where there is one that an adapter may change.
    """
    pipeline = build()
    write_lora(pipeline, directory / "ink", rank=4, seed=1)
    write_lora(pipeline, directory / "night", rank=7, seed=2, targets=(*FEED_FORWARD, "to_q"), alpha=14)
    write_lora(pipeline, directory / "wide", rank=2, seed=3, targets="all", text_encoder=text_encoder)
    return ["ink", "night", "wide"]


def load_into_stock(pipeline: Any, directory: Path, names: Sequence[str]) -> None:
    """Load adapters as a user of diffusers does."""
    for name in names:
        pipeline.load_lora_weights(directory / name, weight_name="pytorch_lora_weights.safetensors", adapter_name=name)


def set_stock_adapters(pipeline: Any, selection: LoraSelection) -> None:
    """Set the adapters of one request as a user of diffusers does."""
    if selection:
        pipeline.enable_lora()
        pipeline.set_adapters(selection.names, [scale for _, scale in selection.scales])
    else:
        pipeline.disable_lora()
