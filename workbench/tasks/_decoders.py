"""Cuts a transformers decoder into embedding, layers and head with norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


def decoder_parts(model: nn.Module) -> list[nn.Module] | None:
    """Returns the parts of a causal language model built like transformers' Llama; None for other models.

    The parts take token ids, as `model(ids)` or `model(input_ids=ids)`. They return only `logits`. They ignore padding,
    caches and custom positions. The caller first checks on a batch that they compute the same as the model.
    """
    inner: Any = getattr(model, "model", None)
    outer: Any = model
    if not all(hasattr(inner, name) for name in ("embed_tokens", "layers", "norm", "rotary_emb")):
        return None
    if not hasattr(model, "lm_head") or not hasattr(model, "config"):
        return None
    from torch import nn

    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = inner.embed_tokens

        def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
            made: Tensor = self.embed_tokens(input_ids)
            return made

    class Layer(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, h: Tensor) -> Tensor:
            import torch
            from transformers.masking_utils import create_causal_mask  # type: ignore[import-not-found,unused-ignore]

            places = torch.arange(h.shape[1], device=h.device).unsqueeze(0)
            mask = create_causal_mask(outer.config, h, attention_mask=None, past_key_values=None)
            turned = inner.rotary_emb(h, position_ids=places)
            made = self.layer(h, attention_mask=mask, position_ids=places, position_embeddings=turned)
            hidden: Tensor = made[0] if isinstance(made, tuple) else made
            return hidden

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.lm_head = inner.norm, outer.lm_head

        def forward(self, h: Tensor) -> Any:
            from transformers.modeling_outputs import CausalLMOutput  # type: ignore[import-not-found,unused-ignore]

            return CausalLMOutput(logits=self.lm_head(self.norm(h)))

    return [Embedding(), *(Layer(layer) for layer in inner.layers), Head()]
