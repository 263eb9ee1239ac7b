"""A transformers checkpoint of the Qwen2 family as a GGUF file, so that llama.cpp computes with the same weights.

Uses the package `gguf` (the extra `gguf` brings it). The file has no tokenizer: its reader gives token ids.
"""

from pathlib import Path
from typing import Any

import torch

KINDS = ("q8_0", "f16")  # of matrices; vectors (norms and biases) stay in float32, as in llama.cpp's own files


def write(model: Any, path: Path, kind: str) -> None:
    """Write a Qwen2 model's weights to `path` with its matrices in `kind`. Raises `ValueError` for another family."""
    import gguf

    config = model.config
    if config.model_type != "qwen2":
        raise ValueError(f"Only models of the qwen2 family can be written as GGUF here; this is {config.model_type!r}.")
    if kind not in KINDS:
        raise ValueError(f"Unknown kind {kind!r} of a GGUF file's matrices. Known: {', '.join(KINDS)}.")
    writer = gguf.GGUFWriter(path, "qwen2")
    add_shape(writer, config)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if kind == "q8_0" else gguf.LlamaFileType.MOSTLY_F16)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    stored = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "f16": gguf.GGMLQuantizationType.F16}[kind]
    for name, weight in _weights(model).items():
        title = names.get_name(name, try_suffixes=(".weight", ".bias"))
        values = weight.detach().to("cpu", torch.float32).numpy()
        if values.ndim > 1:
            writer.add_tensor(title, gguf.quants.quantize(values, stored), raw_dtype=stored)
        else:
            writer.add_tensor(title, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_shape(writer: Any, config: Any) -> None:
    """Write the sizes of a Qwen2 model's parts to a `gguf.GGUFWriter`."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _weights(model: Any) -> dict[str, torch.Tensor]:
    """Every weight once: an output head that is tied to the embeddings is not written, llama.cpp ties it itself."""
    tied = model.config.tie_word_embeddings
    return {name: value for name, value in model.state_dict().items() if not (tied and name == "lm_head.weight")}
