"""The neutral text: what stands before a chunk while its expected KV is computed (ours).

In a prompt most chunks stand behind other passages. KV of a chunk encoded alone differs from that in two ways: the
first tokens attend to each other far too much, and in layers with a sliding window they see the start of the prompt,
which is out of the window at their true place. Behind a long text of any content most of this difference is gone, with
nothing recomputed (docs/selection.md). The text ships with the package and is equal for all chunks, so no words of one
document are carried into the KV of another. A change of the text changes the identity of expected entries.
"""

import logging
from importlib.resources import files
from typing import Any

NEUTRAL_TOKENS = 1_280  # At most the last `NEUTRAL_TOKENS` of the text are used. Longer is a little better, and slower.
MOST_UNKNOWN = 0.02  # A text of which a tokenizer knows fewer than all but the share `MOST_UNKNOWN` is not used.

log = logging.getLogger(__name__)


def neutral_ids(tokenizer: Any | None) -> tuple[int, ...]:
    """The text's token ids; none without a tokenizer, or with one that does not know its words.

    Where there are none, chunks are encoded alone, and the log says so.
    """
    if tokenizer is None:
        log.info("Without a tokenizer there is no neutral text: chunks are encoded alone.")
        return ()
    text = files(__package__).joinpath("neutral_text.txt").read_text("utf-8").strip() + "\n\n"
    ids = tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    unknown = 0 if tokenizer.unk_token_id is None else ids.count(tokenizer.unk_token_id)
    if unknown > MOST_UNKNOWN * len(ids):
        log.info("The tokenizer does not know %d of %d neutral tokens: chunks are encoded alone.", unknown, len(ids))
        return ()
    return ids[-NEUTRAL_TOKENS:]


__all__ = ["neutral_ids"]
