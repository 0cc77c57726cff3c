"""The parts of the shapes pipeline before training: tokenizer, text encoders, autoencoder, transformer."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from diffusers.models.attention_processor import JointAttnProcessor2_0
from tokenizers import pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
)

TOKENS = 16  # length of every tokenized caption
TEXT_WIDTH = 64  # width of each of the two text encoders
WIDTH = 128  # width of the transformer
HEAD_WIDTH = 32
LATENT_CHANNELS = 8
SHIFT = 1.0  # of the timesteps towards noise


def word_tokenizer(words: Iterable[str]) -> CLIPTokenizer:
    """A CLIP tokenizer with one token for each of the words; others fall into bytes, so none is unknown."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = alphabet + [letter + "</w>" for letter in alphabet]
    merges: Any = []  # pairs of strings, though CLIPTokenizer's annotation says strings
    for word in sorted(set(words)):
        prefix = ""
        for letter in [*word[:-1], word[-1] + "</w>"]:
            if prefix and (prefix, letter) not in merges:
                merges.append((prefix, letter))
                vocabulary.append(prefix + letter)
            prefix += letter
    vocabulary += ["<|startoftext|>", "<|endoftext|>"]
    tokens = {token: number for number, token in enumerate(dict.fromkeys(vocabulary))}
    return CLIPTokenizer(vocab=tokens, merges=merges, model_max_length=TOKENS)


def text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    """A CLIP text encoder of two layers."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModelWithProjection(config)


def autoencoder() -> Any:
    """An autoencoder that makes 8 x H/4 x W/4 latents of 3 x H x W pictures."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 32),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=64,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def transformer() -> Any:
    """A transformer of four joint-attention blocks, for 64 x 64 pictures by default and 128 x 128 at most."""
    return SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=4,
        attention_head_dim=HEAD_WIDTH,
        num_attention_heads=WIDTH // HEAD_WIDTH,
        joint_attention_dim=2 * TEXT_WIDTH,
        pooled_projection_dim=2 * TEXT_WIDTH,
        caption_projection_dim=WIDTH,
        pos_embed_max_size=16,
        qk_norm="rms_norm",
    )


class Denoiser(nn.Module):
    """The text encoders and the transformer, which are trained together."""

    def __init__(self, tokenizer: CLIPTokenizer) -> None:
        super().__init__()
        self.text_encoders = nn.ModuleList([text_encoder(tokenizer), text_encoder(tokenizer)])
        self.transformer = transformer()
        self.transformer.set_attn_processor(BiasedJointAttention())

    def forward(self, latents: Tensor, timesteps: Tensor, tokens: Tensor, empty_tokens: int) -> Tensor:
        """The velocity at noisy latents of shape (B, 8, h, w), for timesteps (B) and tokens (B, 16).

        After the caption's tokens the pipeline appends `max_sequence_length` silent ones. They are all alike,
        so a single one whose attention score is raised by the logarithm of their number has exactly the same
        effect, in a third of the time.
        """
        encoded = [encoder(tokens, output_hidden_states=True) for encoder in self.text_encoders]
        states = torch.cat([output.hidden_states[-2] for output in encoded], dim=-1)
        bias = states.new_zeros(1, 1, 1, latents.shape[2] * latents.shape[3] // 4 + TOKENS + 1)
        bias[..., -1] = math.log(empty_tokens)
        velocity: Tensor = self.transformer(
            hidden_states=latents,
            timestep=timesteps,
            encoder_hidden_states=functional.pad(states, (0, 0, 0, 1)),
            pooled_projections=torch.cat([output.text_embeds for output in encoded], dim=-1),
            joint_attention_kwargs={"attention_mask": bias},
            return_dict=False,
        )[0]
        return velocity


def _split_heads(attention: Any, states: Tensor) -> Tensor:
    """From (B, tokens, heads x width) to (B, heads, tokens, width)."""
    batch, tokens, _ = states.shape
    return states.view(batch, tokens, attention.heads, -1).transpose(1, 2)


class BiasedJointAttention:
    """SD3's joint attention with a bias on the attention scores, which the stock one ignores."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, attention_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        picture_query = attn.norm_q(_split_heads(attn, attn.to_q(hidden_states)))
        picture_key = attn.norm_k(_split_heads(attn, attn.to_k(hidden_states)))
        picture_value = _split_heads(attn, attn.to_v(hidden_states))
        text_query = attn.norm_added_q(_split_heads(attn, attn.add_q_proj(encoder_hidden_states)))
        text_key = attn.norm_added_k(_split_heads(attn, attn.add_k_proj(encoder_hidden_states)))
        text_value = _split_heads(attn, attn.add_v_proj(encoder_hidden_states))

        query = torch.cat([picture_query, text_query], dim=2)
        key = torch.cat([picture_key, text_key], dim=2)
        value = torch.cat([picture_value, text_value], dim=2)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
        mixed = mixed.transpose(1, 2).flatten(2)
        patches = hidden_states.shape[1]
        picture_states, text_states = mixed[:, :patches], mixed[:, patches:]
        if not attn.context_pre_only:
            text_states = attn.to_add_out(text_states)
        return attn.to_out[0](picture_states), text_states


def pipeline(tokenizer: CLIPTokenizer, vae: Any, denoiser: Denoiser) -> Any:
    """The stock pipeline around these parts, with the stock attention."""
    denoiser.transformer.set_attn_processor(JointAttnProcessor2_0())
    first, second = denoiser.text_encoders
    return StableDiffusion3Pipeline(
        transformer=denoiser.transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        vae=vae,
        text_encoder=first,
        tokenizer=tokenizer,
        text_encoder_2=second,
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )
