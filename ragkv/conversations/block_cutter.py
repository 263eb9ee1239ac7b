"""Cuts the KV that a turn makes into blocks (CachedAttention section 3.1). Nothing is stored here."""

import secrets
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ragkv.prompt import Prompt, TurnKV
from ragkv.prompt.history import Block, Chain
from ragkv.store import ids_digest


class CutBlock(NamedTuple):
    """A block with its KV."""

    block: Block
    kv: torch.Tensor  # (L, 2, G, T, D), a view of what the turn recorded


class BlockCutter:
    """The blocks of one turn's prompt and answer, which grow from the front."""

    def __init__(self, prompt: Prompt, made: TurnKV, block_tokens: int, next_index: int) -> None:
        """`next_index` is the number of the first new block."""
        self._made = made
        self._block_tokens = block_tokens
        self._next_index = next_index
        self._prefix_digest = ids_digest(prompt.prefix)
        self._chain = Chain(prompt.prefix)
        # in the context of inexact blocks, so that only this session finds them
        self._taint = secrets.token_hex(16)
        self._past = prompt.blocks
        self.blocks: list[Block] = []  # so far, from the beginning of the history on
        self.at = len(prompt.prefix)  # the position behind them

    def past(self, token_ids: Sequence[int]) -> Iterator[CutBlock]:
        """The blocks of the prompt's history that were computed again. `token_ids` are the
        prompt's.
        """
        for number, block in enumerate(self._past):
            if number in self._made.recomputed_blocks:
                cut = self._cut(token_ids, self.at + len(block), block.index)
                block = cut.block
                yield cut
            self._append(block)

    def complete(self, token_ids: Sequence[int]) -> Iterator[CutBlock]:
        """New blocks that are complete. `token_ids` are those of the prompt and of the answer so
        far.
        """
        made = self._made
        while True:
            stop = self.at + self._block_tokens
            if self.at < made.exact_until < stop:  # so that what is exact has a block of its own
                stop = made.exact_until
            if self._recorded_to(token_ids) < stop:
                return
            yield self._new(token_ids, stop)

    def rest(self, token_ids: Sequence[int]) -> Iterator[CutBlock]:
        """What is left once all tokens are known: complete blocks, then a shorter one."""
        yield from self.complete(token_ids)
        # it is exact all through, or not at all: a complete block ended at the bound
        if self.at < (stop := self._recorded_to(token_ids)):
            yield self._new(token_ids, stop)

    def _recorded_to(self, token_ids: Sequence[int]) -> int:
        return min(self._made.record.filled_to, len(token_ids))

    def _new(self, token_ids: Sequence[int], stop: int) -> CutBlock:
        cut = self._cut(token_ids, stop, self._next_index)
        self._next_index += 1
        self._append(cut.block)
        return cut

    def _append(self, block: Block) -> None:
        self.blocks.append(block)
        self.at += len(block)
        self._chain.add(block.kept_ids)

    def _cut(self, token_ids: Sequence[int], stop: int, index: int) -> CutBlock:
        """The tokens from `at` to `stop` as block number `index`."""
        made = self._made
        ids = tuple(token_ids[self.at : stop])
        is_exact = stop <= made.exact_until
        block = Block(
            self._chain.context(made.frequencies, "" if is_exact else self._taint),
            self._prefix_digest,
            made.frequencies,
            token_ids=ids,
            index=index,
            start=0,
            stop=len(ids),
            fused=made.fused and not is_exact,
        )
        first = made.record.start
        return CutBlock(block, made.record.kv[:, :, :, self.at - first : stop - first])
