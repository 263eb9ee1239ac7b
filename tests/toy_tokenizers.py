"""Small tokenizers with one token per byte, so that a text has the same tokens in any context."""

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MARKERS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
)
CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + "
    "'<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PAD = 0
BOS = 1
EOS = 2
VOCABULARY = 3 + 256 + len(MARKERS)


def byte_tokenizer(
    chat_template: str | None = None, bos: bool = True, merges: Sequence[tuple[str, str]] = ()
) -> Any:
    """Token 3 + n is the n-th of the 256 bytes in the byte-level alphabet's order; no merges but
    those given.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {
        "<pad>": PAD,
        "<s>": BOS,
        "</s>": EOS,
        **{char: 3 + n for n, char in enumerate(alphabet)},
    }
    vocabulary |= {"".join(pair): len(vocabulary) + n for n, pair in enumerate(merges)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    special = {"eos_token": "</s>", "pad_token": "<pad>", **({"bos_token": "<s>"} if bos else {})}
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    made.chat_template = chat_template
    return made


def fallback_tokenizer() -> Any:
    """As sentencepiece does it: a few whole words, and bytes `<0x00>` ... for everything else."""
    words = ["▁", "▁the", "the", "stop", "▁st", "op", "s"]
    pieces = [*(f"<0x{n:02X}>" for n in range(256)), *words]
    vocabulary = [("<pad>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((piece, -1.0) for piece in pieces)]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
