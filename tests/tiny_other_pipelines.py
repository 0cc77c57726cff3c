"""Real pipelines of families that have no adapter, with random weights, built in a fraction of a second, offline."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    AutoencoderDC,
    AutoencoderKLLTXVideo,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    SanaPipeline,
    SanaTransformer2DModel,
)
from transformers import Gemma2Config, Gemma2Model

from tests.tiny_pipelines import _autoencoder, _ready, _t5_encoder, _t5_tokenizer


def sana() -> Any:
    """A SanaPipeline; it makes the nearest of its own sizes of about 512x512, and resizes the picture."""
    torch.manual_seed(0)
    tokenizer = _t5_tokenizer()
    levels = 6  # each halves the picture: one latent for 32x32 pixels, as the real one has
    pipeline = SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=Gemma2Model(
            Gemma2Config(
                vocab_size=len(tokenizer),
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=8,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                bos_token_id=None,
            )
        ),
        vae=AutoencoderDC(
            latent_channels=4,
            attention_head_dim=2,
            encoder_block_types="ResBlock",
            decoder_block_types="ResBlock",
            encoder_block_out_channels=(4,) * levels,
            decoder_block_out_channels=(4,) * levels,
            encoder_layers_per_block=(1,) * levels,
            decoder_layers_per_block=(1,) * levels,
            encoder_qkv_multiscales=((),) * levels,
            decoder_qkv_multiscales=((),) * levels,
            upsample_block_type="interpolate",
            downsample_block_type="stride_conv",
            scaling_factor=0.41407,
        ),
        transformer=SanaTransformer2DModel(
            sample_size=16,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_attention_heads=2,
            attention_head_dim=4,
            num_cross_attention_heads=2,
            cross_attention_head_dim=4,
            cross_attention_dim=8,
            caption_channels=16,
        ),
        scheduler=DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    )
    return _ready(pipeline, torch.float32)


def ltx() -> Any:
    """An LTXPipeline: videos. Sizes in steps of 32, frames in steps of 2 from 1 (the real one: in steps of 8)."""
    torch.manual_seed(0)
    tokenizer = _t5_tokenizer()
    pipeline = LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=AutoencoderKLLTXVideo(
            latent_channels=8,
            block_out_channels=(8, 8),
            down_block_types=("LTXVideoDownBlock3D",) * 2,
            decoder_block_out_channels=(8, 8),
            layers_per_block=(1, 1, 1),
            decoder_layers_per_block=(1, 1, 1),
            spatio_temporal_scaling=(True, False),
            decoder_spatio_temporal_scaling=(True, False),
            decoder_inject_noise=(False, False, False),
            downsample_type=("conv", "conv"),
            upsample_residual=(False, False),
            upsample_factor=(1, 1),
        ),
        text_encoder=_t5_encoder(tokenizer),
        tokenizer=tokenizer,
        transformer=LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            num_attention_heads=4,
            attention_head_dim=8,
            cross_attention_dim=32,
            num_layers=1,
            caption_channels=64,
        ),
    )
    return _ready(pipeline, torch.float32)


def aura_flow() -> Any:
    """An AuraFlowPipeline; sizes in steps of 4."""
    torch.manual_seed(0)
    tokenizer = _t5_tokenizer()
    pipeline = AuraFlowPipeline(
        tokenizer=tokenizer,
        text_encoder=_t5_encoder(tokenizer),
        vae=_autoencoder(),
        transformer=AuraFlowTransformer2DModel(
            sample_size=32,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_mmdit_layers=1,
            num_single_dit_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=64,
            caption_projection_dim=32,
            pos_embed_max_size=256,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )
    return _ready(pipeline, torch.float32)
