"""Where an answer ends; streamed text: whole characters, no part of a stop string, pieces that join
to the text.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragkv.errors import InputError
from ragkv.model.decode import stopping
from ragkv.model.decode.stopping import TextStream, end_tokens
from tests.toy_tokenizers import byte_tokenizer, fallback_tokenizer

BYTES = byte_tokenizer()
FALLBACK = fallback_tokenizer()


def ids_of(text: str, tokenizer: Any = BYTES) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def pieces(tokenizer: Any, ids: list[int], stop: Any = ()) -> tuple[list[str], TextStream]:
    """The pieces returned token by token until a stop string or the end, and the stream."""
    stream = TextStream(tokenizer, stop)
    out = []
    for token in ids:
        out.append(stream.add(token))
        if stream.stopped:
            break
    return [*out, stream.flush()], stream


@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK], ids=["byte-level", "byte-fallback"])
@pytest.mark.parametrize("text", ["é", "€", "🦊", "a🦊b", "👩‍👩‍👧"])
def test_a_character_of_several_bytes_is_returned_whole(tokenizer: Any, text: str) -> None:
    ids = ids_of(text, tokenizer)
    assert len(ids) > len(text)
    out, stream = pieces(tokenizer, ids)
    assert "".join(out) == stream.text == text
    assert not any("\ufffd" in piece for piece in out)


def test_text_is_returned_as_soon_as_it_is_certain() -> None:
    out, _ = pieces(BYTES, ids_of("ab"))
    assert out == ["a", "b", ""]


def test_a_stop_string_inside_one_token_is_found() -> None:
    stop_token = FALLBACK.convert_tokens_to_ids("stop")
    out, stream = pieces(FALLBACK, [*ids_of("s", FALLBACK), stop_token], ["to"])
    assert stream.stopped
    assert "".join(out) == "ss"


def test_special_tokens_have_no_text() -> None:
    out, _ = pieces(BYTES, [*ids_of("a"), BYTES.eos_token_id, *ids_of("b")])
    assert "".join(out) == "ab"


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    assert TextStream(None).add(5) == ""
    with pytest.raises(InputError, match="no tokenizer"):
        TextStream(None, ["end"])


@settings(max_examples=100)
@given(
    text=st.text("ab€🦊", max_size=8),
    stop=st.lists(st.text("ab€", min_size=1, max_size=3), max_size=2),
)
def test_the_pieces_join_to_the_text_before_the_first_stop_string(
    text: str, stop: list[str]
) -> None:
    for tokenizer in (BYTES, FALLBACK):
        out, stream = pieces(tokenizer, ids_of(text, tokenizer), stop)
        _, cut = min(
            ((text.find(s) + len(s), text.find(s)) for s in stop if s in text),
            default=(0, len(text)),
        )
        assert "".join(out) == stream.text == text[:cut]
        assert stream.stopped == (cut < len(text))


@settings(max_examples=100)
@given(ids=st.lists(st.integers(3, 258), max_size=12), fallback=st.booleans())
def test_the_pieces_join_to_the_text_for_any_bytes(ids: list[int], fallback: bool) -> None:
    tokenizer = FALLBACK if fallback else BYTES
    out, stream = pieces(tokenizer, ids)
    assert "".join(out) == stream.text
    assert len(stream.text) == len(tokenizer.decode(ids))


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    noise=st.lists(st.integers(3, 262), max_size=40),
    text=st.text("ab €🦊é", min_size=4, max_size=30),
    stop=st.lists(st.text("ab€", min_size=1, max_size=3), max_size=1),
)
def test_tokens_that_are_decoded_no_more_change_no_text(
    monkeypatch: pytest.MonkeyPatch, noise: list[int], text: str, stop: list[str]
) -> None:
    for tokenizer, ids in (
        (BYTES, noise),
        (BYTES, ids_of(text)),
        (FALLBACK, ids_of(text, FALLBACK)),
    ):
        wanted, whole = pieces(tokenizer, ids, stop)
        with monkeypatch.context() as patch:
            patch.setattr(stopping, "WINDOW_TOKENS", 4)
            got, stream = pieces(tokenizer, ids, stop)
        assert (got, stream.text, stream.stopped) == (wanted, whole.text, whole.stopped)


@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK], ids=["byte-level", "byte-fallback"])
def test_a_long_answer_decodes_no_token_more_than_a_few_times_the_window(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = tokenizer.decode
    decoded = 0

    def counting(ids: list[int], **options: Any) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode(ids, **options)

    monkeypatch.setattr(tokenizer, "decode", counting)
    text = "stop by 🦊 ab. " * 200
    ids = ids_of(text, tokenizer)
    _, stream = pieces(tokenizer, ids)
    assert stream.text == text.lstrip()
    assert decoded < 3 * stopping.WINDOW_TOKENS * len(ids)


@pytest.mark.parametrize(
    ("of_generation", "of_model", "of_tokenizer", "wanted"),
    [
        ([7, 8], 2, 3, (7, 8)),
        (7, 2, 3, (7,)),
        (None, 2, 3, (2,)),
        (None, None, 3, (3,)),
        (None, None, None, ()),
    ],
)
def test_end_tokens_come_from_the_first_source_that_names_them(
    of_generation: Any, of_model: Any, of_tokenizer: Any, wanted: tuple[int, ...]
) -> None:
    model = SimpleNamespace(
        generation_config=SimpleNamespace(eos_token_id=of_generation),
        config=SimpleNamespace(eos_token_id=of_model),
    )
    assert end_tokens(model, SimpleNamespace(eos_token_id=of_tokenizer)) == wanted
