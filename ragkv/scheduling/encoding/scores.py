"""The scores that lie next to stored entries: looked up for requests, and which entries lack them."""

import torch

from ragkv.errors import EntryDamagedError
from ragkv.store import Entry, Store

from .encoder import Encoder


class StoredScores:
    """Scores of one encoder's chunks in a store."""

    def __init__(self, encoder: Encoder, store: Store) -> None:
        self._encoder, self._store = encoder, store

    def find(self, token_ids: tuple[int, ...]) -> torch.Tensor | None:
        """The scores (T, 1 + C) of a stored chunk; `None` if it has none, or the encoder makes none."""
        scorer = self._encoder.scorer
        if scorer is None or not self._encoder.makes_scores:
            return None
        scores = self._store.scores(self._encoder.scores_identity, token_ids)
        fits = scores is not None and scores.shape == (len(token_ids), scorer.columns)  # anyone may write to a server
        return scores if fits else None

    def lacking(self, token_ids: tuple[int, ...]) -> bool:
        """Whether the encoder makes scores, and this chunk has none."""
        return self._encoder.makes_scores and self.find(token_ids) is None

    def unscored(self, token_ids: tuple[int, ...]) -> Entry | None:
        """The stored entry of a chunk that lacks scores; `None` if it has them, or is not stored or cannot be read."""
        return self.entry(token_ids) if self.lacking(token_ids) else None

    def entry(self, token_ids: tuple[int, ...]) -> Entry | None:
        """The stored entry of a chunk, read where it lies; `None` if it is not stored or cannot be read."""
        lease = self._store.lease(self._encoder.identity, token_ids, promote=False)
        if lease is None:
            return None
        with lease:
            try:
                layers = [lease.read_layer(layer).clone() for layer in range(lease.info.layers)]
            except EntryDamagedError:  # the tier has dropped it
                return None
        return Entry(lease.info, torch.stack(layers))


__all__ = ["StoredScores"]
