"""Real Wan pipelines with random weights, small enough to be built in a fraction of a second, offline."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

from tests.tiny_pipelines import _ready, _t5_tokenizer


def wan(*, dtype: torch.dtype = torch.float32, scheduler: Any = None, **config: Any) -> Any:
    """A WanPipeline as Wan 2.1 is: one transformer. Sizes in steps of 16, frames in steps of 4 from 1.

    Args:
        config: further arguments of the pipeline.
    """
    torch.manual_seed(0)
    tokenizer = _t5_tokenizer()
    pipeline = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=UMT5EncoderModel(
            UMT5Config(
                vocab_size=len(tokenizer),
                d_model=32,
                d_kv=8,
                d_ff=37,
                num_layers=2,
                num_heads=4,
                decoder_start_token_id=0,
                tie_word_embeddings=False,
            )
        ),
        vae=AutoencoderKLWan(
            base_dim=3,
            z_dim=16,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
        ),
        scheduler=scheduler
        or UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        transformer=_transformer(),
        **config,
    )
    return _ready(pipeline, dtype)


def wan_2_2(*, dtype: torch.dtype = torch.float32, scheduler: Any = None) -> Any:
    """A WanPipeline as Wan 2.2 is: two different transformers, each of which has steps of its own from 3 steps on."""
    torch.manual_seed(1)
    return wan(dtype=dtype, scheduler=scheduler, transformer_2=_transformer(), boundary_ratio=0.875)


def _transformer() -> WanTransformer3DModel:
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=256,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
