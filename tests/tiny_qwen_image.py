"""Qwen-Image pipelines with random weights, small enough to be built in a fraction of a second, offline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from transformers import (
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessorPil,
    Qwen2VLProcessor,
)

_stock_dimensions = pipeline_qwenimage_edit.calculate_dimensions

SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def qwen_image(*, dtype: torch.dtype = torch.float32, guidance_embeds: bool = False) -> Any:
    """A QwenImagePipeline; sizes in steps of 8."""
    return _pipeline(QwenImagePipeline, dtype, guidance_embeds)


def qwen_image_edit(*, dtype: torch.dtype = torch.float32) -> Any:
    """A QwenImageEditPipeline; sizes in steps of 8."""
    return _pipeline(QwenImageEditPipeline, dtype)


def resize_input_images_to_64_x_64_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """To as many pixels in their own aspect ratio: the 1024 x 1024 that the stock call asks for take too long."""
    monkeypatch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", small_dimensions)


def small_dimensions(area: int, ratio: float) -> Any:
    """The stock calculation for a 256th of the area."""
    return _stock_dimensions(area // 16**2, ratio)


def _pipeline(kind: Any, dtype: torch.dtype, guidance_embeds: bool = False) -> Any:
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    components = {
        # As in Qwen/Qwen-Image
        "scheduler": FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=0.9,
            base_image_seq_len=256,
            max_image_seq_len=8192,
            shift_terminal=0.02,
            time_shift_type="exponential",
        ),
        "vae": AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 2, 4],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            latents_mean=[0.1, -0.2, 0.3, -0.4],
            latents_std=[1.1, 1.2, 1.3, 1.4],
        ),
        "text_encoder": _text_encoder(tokenizer),
        "tokenizer": tokenizer,
        "transformer": QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=3,
            joint_attention_dim=16,
            axes_dims_rope=(8, 4, 4),
            guidance_embeds=guidance_embeds,
        ),
    }
    if kind is QwenImageEditPipeline:
        components["processor"] = _ImageAndTextProcessor(Qwen2VLImageProcessorPil(), tokenizer)
    pipeline = kind(**components)
    if dtype != torch.float32:
        pipeline.to(dtype=dtype)
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            component.eval()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


class _ImageAndTextProcessor(Qwen2VLProcessor):  # type: ignore[misc]
    """Without the video processor, which needs torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids(
            [self.image_token, self.video_token]
        )
        ProcessorMixin.__init__(self, image_processor, tokenizer)


def _tokenizer() -> Any:
    """A Qwen2 tokenizer with a token for each word of the pipelines' templates, whose first tokens are cut off."""
    templates = [
        kind(*[None] * components).prompt_template_encode
        for kind, components in ((QwenImagePipeline, 5), (QwenImageEditPipeline, 6))
    ]
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(templates, vocab_size=1000, show_progress=False)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL_TOKENS)})
    return tokenizer


def _text_encoder(tokenizer: Any) -> Qwen2_5_VLForConditionalGeneration:
    rope = {"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 1e6}
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "vocab_size": len(tokenizer),
                "bos_token_id": tokenizer.eos_token_id,
                "eos_token_id": tokenizer.eos_token_id,
                "rope_parameters": rope,
            },
            vision_config={
                "depth": 2,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": 16,
            },
            vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
            vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
            image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
            video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        )
    )
