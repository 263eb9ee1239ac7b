"""Tiny random models and SmolLM2, which both vLLM and ragkv load, and prompts for them."""

import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers

from ragkv.model.loading import folder_of, load_tokenizer
from tests import tiny_models

SMOLLM2 = "smollm2"

VOCABULARY = 512
BOS = 1
BLOCK_TOKENS = 32  # vLLM's blocks: chunk lengths lie on both sides of their edges
WINDOW = 48

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", tiny_models.llama3(128)),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", dict(sliding_window=WINDOW)),
}


def save(family: str, folder: Path) -> None:
    """Save a model of 4 layers whose weights are large enough that the context changes the answer;
    or SmolLM2.
    """
    if family == SMOLLM2:
        folder.symlink_to(folder_of(family))
        return
    kind, settings = FAMILIES[family]
    sizes = dict(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=192, head_dim=32)
    more = dict(max_position_embeddings=2048, initializer_range=0.2)
    config = getattr(transformers, f"{kind}Config")(
        **{**tiny_models.BASE, **sizes, **more, **settings}
    )
    torch.manual_seed(0)
    getattr(transformers, f"{kind}ForCausalLM")(config).eval().save_pretrained(folder)


def vllm_request(name: str, ids: Sequence[int], **changes: Any) -> Any:
    """A request as vLLM's scheduler has it."""
    fields: dict[str, Any] = dict.fromkeys(
        ("lora_request", "pooling_params", "kv_transfer_params", "cache_salt")
    )
    fields |= dict(request_id=name, prompt_token_ids=list(ids), mm_features=[], block_hashes=[])
    fields |= dict(skip_reading_prefix_cache=False, update_block_hashes=lambda: None)
    return SimpleNamespace(**{**fields, **changes})


def tokens(count: int, seed: int, family: str = "") -> tuple[int, ...]:
    """`count` random ids without special ones. For SmolLM2 those of real text, other ones for each
    seed.
    """
    if family == SMOLLM2:
        return _piece(count, seed)
    made = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, VOCABULARY, (count,), generator=made).tolist())


def prompt(seed: int, family: str = "") -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """The chunks, 2 to 8 of them, and the question of a prompt; their lengths lie around the edges
    of blocks.
    """
    lengths = [BLOCK_TOKENS + (seed + 3 * index) % 5 - 2 for index in range(2 + seed % 7)]
    chunks = [tokens(length, 100 * seed + index, family) for index, length in enumerate(lengths)]
    return chunks, tokens(3 + seed % 6, 100 * seed + 99, family)


@cache
def _piece(count: int, seed: int) -> tuple[int, ...]:
    """The next `count` tokens of the example corpus."""
    taken = tuple(itertools.islice(_text(), count))
    assert len(taken) == count, seed
    return taken


@cache
def _text() -> Iterator[int]:
    files = sorted((Path(__file__).parents[3] / "examples" / "corpus").glob("*.md"))
    text = "".join(file.read_text() for file in files)
    return iter(load_tokenizer(folder_of(SMOLLM2))(text, add_special_tokens=False)["input_ids"])
