"""Models of real shapes with random weights, and random entries, for benchmarks of time: what the
numbers are changes no time. Say that they are random wherever a number from them is shown.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ragkv import Engine
from ragkv.errors import ConfigError
from ragkv.store.codecs import Codec
from ragkv.store.entry import Entry, EntryInfo, StoredEntry
from ragkv.store.stored_form import stored_form

_COLUMNS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)
SHAPES: dict[
    str, tuple[str, tuple[int, ...], dict[str, Any]]
] = {  # A shape is a family, a size per column, and other settings.
    "qwen2.5-0.5b": ("Qwen2", (896, 4864, 24, 14, 2, 151936, 32768), {"tie_word_embeddings": True}),
    "llama-3.2-1b": (
        "Llama",
        (2048, 8192, 16, 32, 8, 128256, 131072),
        {"head_dim": 64, "tie_word_embeddings": True},
    ),
    "qwen2.5-1.5b": (
        "Qwen2",
        (1536, 8960, 28, 12, 2, 151936, 32768),
        {"tie_word_embeddings": True},
    ),
    "llama-3.2-3b": (
        "Llama",
        (3072, 8192, 28, 24, 8, 128256, 131072),
        {"head_dim": 128, "tie_word_embeddings": True},
    ),
    # 4096 positions in the real model
    "llama-2-7b": ("Llama", (4096, 11008, 32, 32, 32, 32000, 32768), {}),
    "llama-3-8b": ("Llama", (4096, 14336, 32, 32, 8, 128256, 8192), {}),
    # Small layers with as many bytes of KV a token as Llama-3-8B: 131,072.
    "llama-3-8b-kv": ("Llama", (128, 128, 32, 8, 8, 151936, 8192), {"head_dim": 128}),
    "tiny": ("Llama", (128, 256, 4, 4, 2, 512, 32768), {}),
}
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}> {% endif %}"
)


def shape_config(shape: str, layers: int | None = None) -> Any:
    """The transformers config of a shape, optionally with other `layers`; raises `ConfigError` with
    the known names.
    """
    import transformers

    if shape not in SHAPES:
        raise ConfigError(f"Unknown shape {shape!r}. Known: {', '.join(sorted(SHAPES))}.")
    name, sizes, others = SHAPES[shape]
    settings = {**dict(zip(_COLUMNS, sizes, strict=True)), **others}
    if layers is not None:
        settings["num_hidden_layers"] = layers
    return getattr(transformers, f"{name}Config")(**settings)


def random_model(
    shape: str, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", layers: int | None = None
) -> Any:
    """A causal LM of that shape with small random weights, in eval mode, optionally with other
    `layers`.

    In float32 its weights are numbers that bfloat16 holds, as those of a bfloat16 checkpoint that
    was widened.
    """
    import transformers

    config = shape_config(shape, layers)
    with torch.device("meta"):
        model = getattr(transformers, f"{SHAPES[shape][0]}ForCausalLM")(config)
    model = model.to(dtype).to_empty(device=device)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.data.fill_(1.0)
        if dtype is torch.float32:
            parameter.data.copy_(parameter.data.bfloat16())
    model.tie_weights()
    body = model.model
    body.rotary_emb = type(body.rotary_emb)(config).to(device)  # its buffers are not weights
    return model.eval()


def put_random_entry(
    engine: Engine, token_ids: tuple[int, ...], *, exact: bool, alike: bool = False
) -> None:
    """Store random KV for `token_ids`. Unless `exact`, it is fused even right behind the prefix.

    Entries that are `alike` have the same numbers, which are made and encoded once.
    """
    adapter = engine.model.adapter
    encoder = engine.entries.encoder
    layers = adapter.layer_count
    heads = adapter.kv_heads
    size = adapter.head_dim
    identity = encoder.identity
    length = len(encoder.prefix_ids) + len(token_ids)
    rope_digest = adapter.rope.digest(length) if exact else "of another prompt"
    info = EntryInfo(identity.key(token_ids), identity, token_ids, rope_digest, layers, heads, size)
    shape = (layers, 2, heads, len(token_ids), size)
    make = _alike if alike else _encoded
    codec, stored = make(shape, adapter.dtype, adapter.device, info)
    if not engine.parts.store.durable.put(StoredEntry(info, codec, stored)):
        raise SystemExit(f"An entry of {info.tokens} tokens was not kept by {engine.config.store}.")


def _encoded(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, info: EntryInfo
) -> tuple[Codec, torch.Tensor]:
    """The stored layers of random KV, and their codec."""
    stored = stored_form(Entry(info, torch.randn(shape, device=device).to(dtype)))
    return stored.codec, stored.layers


_made: dict[Any, tuple[Codec, torch.Tensor]] = {}  # the last entry that is alike others


def _alike(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, info: EntryInfo
) -> tuple[Codec, torch.Tensor]:
    name = (shape, dtype, device, info.identity.codec)
    if name not in _made:
        _made.clear()
        _made[name] = _encoded(shape, dtype, device, info)
    return _made[name]


def talker(
    shape: str, folder: Path, dtype: torch.dtype = torch.bfloat16, layers: int | None = None
) -> Path:
    """Write a model folder of that shape: random weights, and a tokenizer with a text for
    every id.
    """
    model = random_model(shape, dtype, layers=layers)
    model.save_pretrained(folder)
    _tokenizer(model.config.vocab_size).save_pretrained(folder)
    return folder


def _tokenizer(size: int) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<pad>", "<s>", "</s>", *alphabet]
    # random weights mostly generate these
    words += [f"\u0120w{number}" for number in range(size - len(words))]
    backend = Tokenizer(
        models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    made.chat_template = TEMPLATE
    return made
