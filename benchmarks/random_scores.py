"""Random scores next to entries that a benchmark made itself: selecting by them takes the time that it takes."""

import torch

from ragkv import Engine
from ragkv.store import Entry, EntryInfo


def put_random_scores(engine: Engine, info: EntryInfo) -> None:
    """Put scores next to the stored entry of `info`, as the engine's own scorer would."""
    scorer = engine.parts.encoder.scorer
    assert scorer is not None, "this engine makes no scores"
    scores = torch.rand((info.tokens, scorer.columns)).half()
    engine.parts.store.put_scores(Entry.of_scores(info, scorer.name, scores), durably=True)


__all__ = ["put_random_scores"]
