"""Real diffusers pipelines with random weights, small enough to be built in a fraction of a second, offline."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    PixArtAlphaPipeline,
    PixArtTransformer2DModel,
    PNDMScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)


def stable_diffusion_3(*, dtype: torch.dtype = torch.float32, scheduler: Any = None) -> Any:
    """A StableDiffusion3Pipeline with all three text encoders; default size 64x64, sizes in steps of 4."""
    torch.manual_seed(0)
    t5_tokenizer = _t5_tokenizer()
    pipeline = StableDiffusion3Pipeline(
        scheduler=scheduler or FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder=_clip_text_encoder(),
        text_encoder_2=_clip_text_encoder(),
        text_encoder_3=_t5_encoder(t5_tokenizer),
        tokenizer=_clip_tokenizer(),
        tokenizer_2=_clip_tokenizer(),
        tokenizer_3=t5_tokenizer,
        transformer=SD3Transformer2DModel(
            sample_size=32,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            caption_projection_dim=64,
            joint_attention_dim=64,
            pooled_projection_dim=64,
            pos_embed_max_size=64,
        ),
        vae=_autoencoder(),
    )
    return _ready(pipeline, dtype)


def pixart_alpha() -> Any:
    """A PixArtAlphaPipeline: one of the many pipelines without an adapter."""
    torch.manual_seed(0)
    tokenizer = _t5_tokenizer()
    pipeline = PixArtAlphaPipeline(
        tokenizer=tokenizer,
        text_encoder=_t5_encoder(tokenizer),
        vae=_autoencoder(),
        transformer=PixArtTransformer2DModel(
            sample_size=32,
            num_layers=2,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_channels=64,
            in_channels=4,
            out_channels=8,
            cross_attention_dim=32,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            norm_eps=1e-6,
        ),
        scheduler=DPMSolverMultistepScheduler(),
    )
    return _ready(pipeline, torch.float32)


def stable_diffusion_xl(*, dtype: torch.dtype = torch.float32) -> Any:
    """A StableDiffusionXLPipeline; default size 64x64."""
    torch.manual_seed(0)
    pipeline = StableDiffusionXLPipeline(
        vae=_autoencoder(scaling_factor=0.13, shift_factor=None, use_quant_conv=True, use_post_quant_conv=True),
        text_encoder=_clip_text_encoder(CLIPTextModel),
        text_encoder_2=_clip_text_encoder(),
        tokenizer=_clip_tokenizer(),
        tokenizer_2=_clip_tokenizer(),
        unet=_unet(
            cross_attention_dim=64,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            transformer_layers_per_block=(1, 2),
            projection_class_embeddings_input_dim=80,
        ),
        scheduler=EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            steps_offset=1,
            beta_schedule="scaled_linear",
            timestep_spacing="leading",
        ),
        add_watermarker=False,
    )
    return _ready(pipeline, dtype)


def stable_diffusion(*, dtype: torch.dtype = torch.float32) -> Any:
    """A StableDiffusionPipeline without a safety checker; default size 64x64."""
    torch.manual_seed(0)
    pipeline = StableDiffusionPipeline(
        vae=_autoencoder(scaling_factor=0.18, shift_factor=None, use_quant_conv=True, use_post_quant_conv=True),
        text_encoder=_clip_text_encoder(CLIPTextModel),
        tokenizer=_clip_tokenizer(),
        unet=_unet(cross_attention_dim=32),
        scheduler=PNDMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", skip_prk_steps=True, steps_offset=1
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    return _ready(pipeline, dtype)


def flux(*, dtype: torch.dtype = torch.float32) -> Any:
    """A FluxPipeline with distilled guidance; sizes in steps of 4."""
    torch.manual_seed(0)
    tokenizer = _t5_tokenizer()
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_autoencoder(),
        text_encoder=_clip_text_encoder(CLIPTextModel),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=_t5_encoder(tokenizer),
        tokenizer_2=tokenizer,
        transformer=FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=64,
            pooled_projection_dim=32,
            axes_dims_rope=(4, 4, 8),
            guidance_embeds=True,
        ),
    )
    return _ready(pipeline, dtype)


def _ready(pipeline: Any, dtype: torch.dtype) -> Any:
    if dtype != torch.float32:
        pipeline.to(dtype=dtype)
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            component.eval()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _unet(**config: Any) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        block_out_channels=(16, 32),
        layers_per_block=1,
        sample_size=32,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        norm_num_groups=4,
        **config,
    )


def _autoencoder(**config: Any) -> AutoencoderKL:
    defaults = {
        "shift_factor": 0.0609,
        "scaling_factor": 1.5035,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    }
    return AutoencoderKL(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        block_out_channels=(4, 8),
        layers_per_block=1,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=1,
        **{**defaults, **config},
    )


def _clip_tokenizer() -> CLIPTokenizer:
    """A CLIP tokenizer that knows bytes only."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={token: index for index, token in enumerate(tokens)}, merges=[], model_max_length=77)


def _clip_text_encoder(kind: Any = CLIPTextModelWithProjection) -> Any:
    tokenizer = _clip_tokenizer()
    return kind(
        CLIPTextConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            hidden_size=32,
            intermediate_size=37,
            num_attention_heads=4,
            num_hidden_layers=2,
            vocab_size=len(tokenizer),
            projection_dim=32,
        )
    )


def _t5_tokenizer() -> PreTrainedTokenizerFast:
    """A T5 tokenizer that knows bytes only."""
    specials = ["<pad>", "</s>", "<unk>"]
    tokens = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[], unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


def _t5_encoder(tokenizer: PreTrainedTokenizerFast) -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=64,
            d_kv=8,
            d_ff=37,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            tie_word_embeddings=False,
        )
    )
