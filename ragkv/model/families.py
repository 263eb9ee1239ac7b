"""Adapters of the model families that differ from llama, and the registry of adapters by
`model_type`.
"""

from typing import Any, ClassVar

import torch

from ragkv.errors import UnsupportedModelError

from .adapter import Adapter


class Granite(Adapter):
    """Multiplies embeddings in the model's forward and divides logits. Other scales are inside its
    layers.
    """

    model_types = ("granite",)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return super().embed(token_ids) * float(self.body.embedding_multiplier)

    def scale_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits / float(self.config.logits_scaling)


class Cohere2(Adapter):
    """RoPE on sliding layers only, interleaved. Logits are multiplied."""

    model_types = ("cohere2",)

    def rotates(self, layer: int) -> bool:
        return self.windows[layer] is not None

    def scale_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits * float(self.model.logit_scale)


class SmolLM3(Adapter):
    """Some layers have no RoPE. `layer_types` names the layers with windows."""

    model_types = ("smollm3",)

    def rotates(self, layer: int) -> bool:
        return bool(self.config.no_rope_layers[layer])

    def window(self, layer: int) -> int | None:
        return super().window(layer) if self.config.use_sliding_window else None


class Softcapped(Adapter):
    """gemma2: caps final logits. `row_attention` caps the scores and `embed_tokens` scales
    embeddings.
    """

    model_types = ("gemma2",)

    def scale_logits(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap


class Gemma3(Softcapped):
    """Has one rotary table for local layers and one for global layers. Final capping is
    optional.
    """

    model_types = ("gemma3_text",)

    def __init__(self, model: Any, packed_bytes: int = 0) -> None:
        if getattr(model.config, "use_bidirectional_attention", False):
            raise UnsupportedModelError(
                "This gemma3 model attends in both directions, so its KV depends on later tokens."
            )
        super().__init__(model, packed_bytes)

    def rope_kinds(self) -> tuple[str, ...]:
        return tuple(sorted(set(self.config.layer_types)))

    def rope_kind(self, layer: int) -> str:
        return str(self.config.layer_types[layer])


class GPTNeoX(Adapter):
    """Uses other module names. Its layers ignore `past_key_values` silently; their cache argument
    is `layer_past`.
    """

    model_types = ("gpt_neox",)
    attention_name: ClassVar[str] = "attention"
    cache_argument: ClassVar[str] = "layer_past"

    def _body(self) -> Any:
        return self.model.gpt_neox

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.body.embed_in(token_ids.unsqueeze(0))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head(self.body.final_layer_norm(hidden))
        return logits[0].float()


ADAPTERS: dict[str, type[Adapter]] = {
    model_type: adapter
    for adapter in (Adapter, Granite, Cohere2, SmolLM3, Softcapped, Gemma3, GPTNeoX)
    for model_type in adapter.model_types
}
