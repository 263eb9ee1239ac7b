"""A process that unpacks one GGUF file: `python -m ragkv.model.gguf_unpacking FILE FOLDER REASON`.

transformers reads the file's vocabulary again for each part of a model, which takes half a minute
for a small model. Here all parts share one reader, by replacing two functions of gguf. In a
separate process no other code sees the replaced functions, and the memory for unpacking is freed at
its end.
"""

import functools
import re
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from .cpu.int4 import named
from .gguf_blocks import grids_of
from .gguf_files import GRIDS

# a word behind a space, as SentencePiece and byte-level BPE write it
WORD = re.compile("[\u2581\u0120][A-Za-z]{4,12}")
# WORDS of a vocabulary are looked up when a file is unpacked, which takes milliseconds.
WORDS = 200


class _Reader(gguf.GGUFReader):
    """Sees the file as a plain array: numpy's memmap is slow at the many small views of a
    vocabulary.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)


def _unpack(file: Path, folder: Path) -> None:
    """Write the model in `file` to `folder`: config, tokenizer, weights, and the grids of those in
    four bits.
    """
    reader = _Reader(file)
    library: Any = gguf
    # transformers asks for each module
    library.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    library.GGUFReader = lambda *_: reader
    kinds = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
    narrow = torch.float16 if kinds <= {"F32", "F16"} else torch.bfloat16
    dtype = torch.float32 if kinds <= {"F32"} else narrow
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    auto: Any = transformers.AutoModelForCausalLM
    model, found = auto.from_pretrained(**source, dtype=dtype, output_loading_info=True)
    if missing := sorted(found["missing_keys"]):
        raise ValueError(f"{len(missing)} weights are missing, {missing[0]} first")
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    _check_words(tokenizer)
    # The weights are plain now, and can be saved:
    model.config.__dict__.pop("quantization_config", None)
    for attribute in ("is_quantized", "hf_quantizer"):
        model.__dict__.pop(attribute, None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(named(grids_of(reader.tensors, model)), folder / GRIDS)


def _check_words(tokenizer: Any) -> None:
    """Raise `ValueError` if the tokenizer splits words that are tokens of its own.

    transformers 5.17 reads Gemma's vocabulary so, without a word of warning: a prompt gets four
    times as many tokens.
    """
    ids = tokenizer.get_vocab()  # in another order on other processors
    tokens = [token for token in sorted(ids, key=ids.__getitem__) if WORD.fullmatch(token)][:WORDS]
    split = [
        token
        for token in tokens
        if len(tokenizer(f"a {token[1:]}", add_special_tokens=False).input_ids) > 2
    ]
    if len(split) > len(tokens) // 2:
        raise ValueError(
            f"transformers {transformers.__version__} reads its tokenizer wrongly: it splits "
            f"{len(split)} of "
            f"{len(tokens)} words that are tokens, such as {split[0][1:]!r}; try a newer version"
        )


def main(file: str, folder: str, reason: str) -> int:
    """Unpack `file` to `folder`; if that fails write why to the file `reason`."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        _unpack(Path(file), Path(folder))
    except Exception as error:  # a damaged file makes readers of it fail in any way
        Path(reason).write_text(f"{error}" or type(error).__name__, encoding="utf-8")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
