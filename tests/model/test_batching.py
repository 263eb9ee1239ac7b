"""Batched decoding: every row gets the same result as alone, with any other rows."""

import gc
import random
from dataclasses import dataclass

import pytest
import torch

from ragkv.model import Adapter, PromptKV, Recording, adapt, full_pass
from ragkv.model.decode.batching import DecodeRow, decode_rows
from tests import tiny_models
from tests.scheduling.helpers import until

MAX_NEW_TOKENS = 12
LENGTHS = (3, 45, 30, 61, 24, 47)  # around the window and around the length where RoPE changes


@dataclass
class Talk:
    """A prompt and the tokens decoded behind it, alone and in a batch."""

    kv: PromptKV
    alone: PromptKV
    record: Recording
    decoded: int = 0


def talk(adapter: Adapter, length: int, seed: int) -> Talk:
    prompt = torch.tensor(tiny_models.tokens(length, seed))
    kvs = [adapter.new_kv(length + MAX_NEW_TOKENS) for _ in range(2)]
    for kv in kvs:
        full_pass(adapter, prompt, kv)
    return Talk(*kvs, adapter.new_recording(length, length + MAX_NEW_TOKENS))


@torch.no_grad()
def solo(adapter: Adapter, talk: Talk, token: int) -> torch.Tensor:
    """Logits (V,) after one more token, computed by a prefill pass."""
    hidden = full_pass(adapter, torch.tensor([token]), talk.alone, start=talk.alone.length)
    return adapter.logits(hidden)[-1]


def same_kv(got: PromptKV, wanted: PromptKV) -> None:
    assert got.length == wanted.length
    for layer in range(len(got.keys)):
        for own, other in zip(
            got.view(layer, got.length), wanted.view(layer, got.length), strict=True
        ):
            torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
class TestEveryFamily:
    def test_a_prompt_gets_its_solo_logits_in_a_batch_that_others_join_and_leave(
        self, family: str
    ) -> None:
        adapter = adapt(tiny_models.model(family))
        chance = random.Random(7)
        talks = [talk(adapter, length, seed) for seed, length in enumerate(LENGTHS)]
        while able := [t for t in talks if t.decoded < MAX_NEW_TOKENS]:
            present = chance.sample(able, chance.randint(1, len(able)))
            tokens = tiny_models.tokens(len(present), seed=chance.randrange(10**6))
            together = decode_rows(
                adapter,
                [
                    DecodeRow(t.kv, token, t.record)
                    for t, token in zip(present, tokens, strict=True)
                ],
            )
            for own, token, logits in zip(present, tokens, together, strict=True):
                alone = solo(adapter, own, token)
                torch.testing.assert_close(
                    logits, alone, atol=1e-5 * float(alone.abs().max()), rtol=0
                )
                own.decoded += 1
        for own in talks:
            same_kv(own.kv, own.alone)

    def test_a_recording_holds_the_kv_before_rope(self, family: str) -> None:
        adapter = adapt(tiny_models.model(family))
        talks = [talk(adapter, length, seed) for seed, length in enumerate((20, 33))]
        for token in tiny_models.tokens(3, seed=3):
            decode_rows(adapter, [DecodeRow(t.kv, token, t.record) for t in talks])
        for own, start in zip(talks, (20, 33), strict=True):
            for layer in range(adapter.layer_count):
                k_rot, v = (part[:, :, start:] for part in own.kv.view(layer, start + 3))
                for at in range(3):
                    cos, sin = adapter.rope.tables(start + at + 1).span(
                        adapter.rope_kind(layer), start + at, start + at + 1
                    )
                    rotated = adapter.rotate(
                        layer, own.record.kv[layer, 0, :, at : at + 1].unsqueeze(0), cos, sin
                    )
                    torch.testing.assert_close(
                        rotated, k_rot[:, :, at : at + 1], atol=1e-6, rtol=1e-6
                    )
                assert torch.equal(own.record.kv[layer, 1, :, :3], v[0])

    def test_nothing_that_a_step_leaves_behind_is_unusable_in_training(self, family: str) -> None:
        def inference_tensors() -> list[torch.Tensor]:
            return [
                one for one in gc.get_objects() if type(one) is torch.Tensor and one.is_inference()
            ]

        gc.collect()
        # kept, so that no new one has its id
        before = inference_tensors()
        adapter = adapt(tiny_models.model(family))
        kv = adapter.new_kv(2000)  # longer than the rotary tables of loading
        kv.length = 1996
        logits = decode_rows(adapter, [DecodeRow(kv, 3)])
        assert logits.is_inference()
        del logits
        gc.collect()
        # engines may compute
        until(lambda: {id(one) for one in inference_tensors()} <= {id(one) for one in before})


def test_a_failed_decoding_step_may_be_tried_again() -> None:
    adapter = adapt(tiny_models.model("llama"))
    talks = [talk(adapter, length, seed) for seed, length in enumerate((5, 9))]

    class Broken(PromptKV):
        def attend(self, layer: int, *_: object) -> torch.Tensor:  # type: ignore[override]
            if layer == 2:
                raise RuntimeError("on purpose")
            return super().attend(layer, *_)  # type: ignore[arg-type]

    broken = adapter.new_kv(1)
    broken.__class__ = Broken
    rows = [DecodeRow(t.kv, 7) for t in talks]
    with pytest.raises(RuntimeError, match="on purpose"):
        decode_rows(adapter, [*rows, DecodeRow(broken, 7)])
    assert [t.kv.length for t in talks] == [5, 9]
    for own, logits in zip(talks, decode_rows(adapter, rows), strict=True):
        torch.testing.assert_close(logits, solo(adapter, own, 7), atol=1e-5, rtol=1e-5)
