"""Grammars of one tokenizer: what cannot be kept is refused by name, hostile schemas end soon,
tokens are bytes.
"""

import json
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

pytest.importorskip("llguidance")

from ragkv.errors import CancelledError, DeadlineError, InputError, MissingExtraError, SchemaError
from ragkv.prompt.constraints import ResponseFormat
from ragkv.prompt.constraints import grammar as module
from ragkv.prompt.constraints.grammar import ConstraintTokenizer, Grammars, TokenConstraint
from ragkv.runtime import Claim, no_check
from ragkv.runtime.byte_cache import OVERHEAD_BYTES
from tests.faults import raising
from tests.prompt.constraints.helpers import tiny_engine
from tests.reader import READER
from tests.scheduling.helpers import begin, until
from tests.toy_tokenizers import VOCABULARY, byte_tokenizer, fallback_tokenizer


def grammars(tokenizer: Any = None, vocabulary: int = VOCABULARY) -> Grammars:
    return Grammars(ConstraintTokenizer(tokenizer or byte_tokenizer(), vocabulary, ()))


def written(constraint: TokenConstraint, tokenizer: Any, vocabulary: int, seed: int = 0) -> str:
    """A text made of tokens that are chosen at random from what the constraint allows."""
    generator = torch.Generator().manual_seed(seed)
    ids = list[int]()
    while not constraint.finished and len(ids) < 400:
        allowed = constraint.mask(torch.zeros(vocabulary)).isfinite().nonzero().flatten()
        token = int(allowed[torch.randint(len(allowed), (1,), generator=generator)])
        constraint.accept(token)
        ids.append(token)
    assert constraint.finished
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def test_after_a_slow_mask_the_next_one_waits_for_its_turn() -> None:
    tokenizer = ConstraintTokenizer(byte_tokenizer(), VOCABULARY, ())
    matcher = SimpleNamespace(is_stopped=lambda: False, compute_bitmask=lambda: b"mask")
    constraint = TokenConstraint(matcher, tokenizer)
    lock = tokenizer.lock
    with lock.hold():
        constraint.prepare()
        assert constraint._packed == b"mask", "nothing was slow yet"
        constraint._packed = None
        constraint._took_s = 2 * module.SLOW_S
        thread = begin(constraint.prepare)
        until(lambda: lock.waiting == 1)
        assert constraint._packed is None
    thread.join(20)
    assert constraint._packed == b"mask"


BAD = {
    "not": {"properties": {"a": {"not": {}}, "b": {}}, "required": ["a"]},
    "look-around": {
        "type": "array",
        "items": {"properties": {"x/y": {"type": "string", "pattern": "(?=a)b"}}},
    },
    "5": {"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer", "minimum": 5, "maximum": 3}}},
    "strin": {"anyOf": [{"type": "string"}, {"type": "strin"}]},
    "z": {"type": "object", "required": ["z"], "additionalProperties": False},
    "uniqueItems": {"type": "array", "prefixItems": [{"uniqueItems": True}]},
}


@pytest.mark.parametrize("reason", BAD)
def test_a_schema_that_cannot_be_kept_is_refused_and_the_error_names_what_is_at_fault(
    reason: str,
) -> None:
    with pytest.raises(SchemaError) as refused:
        grammars().compile(ResponseFormat.json_schema(BAD[reason]))
    assert reason in refused.value.reason


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": []},
        {"minLength": 3, "maxLength": 2, "type": "string"},
        {"allOf": [{"$ref": "#"}]},
        {"$ref": "http://x/y"},
    ],
    ids=str,
)
def test_a_schema_that_allows_nothing_or_refers_to_elsewhere_is_refused(schema: Any) -> None:
    with pytest.raises(SchemaError):
        grammars().compile(ResponseFormat.json_schema(schema))


HOSTILE: dict[str, Any] = {
    "repetitions": {"type": "string", "pattern": "(a{1,1000}){1,1000}"},
    "many states": {"type": "string", "pattern": "(a|b|c)*a(a|b|c){200}"},
    "patterns joined": {
        "allOf": [{"type": "string", "pattern": f".*a.{{{n}}}b"} for n in range(8)]
    },
    "many patterns joined": {
        "allOf": [{"type": "string", "pattern": f".*a.{{{n}}}b"} for n in range(20)]
    },
    "patterns next to a reference": {
        "$ref": "#/$defs/p0",
        "type": "string",
        "pattern": "^(a|b)*a(a|b){15}$",
        "$defs": {"p0": {"pattern": "^(b|a)*b(b|a){17}$", "type": "string"}},
    },
    "a large multiple": {"type": "integer", "multipleOf": 99_991},
    "a larger multiple": {"type": "integer", "multipleOf": 9_999_991},
    "a multiple of many digits": {"type": "number", "multipleOf": 0.1234567},
    "primes": {
        "allOf": [{"type": "string", "pattern": f"^(a{{{n}}})+b$"} for n in (101, 103, 107)]
    },
    "pattern and length": {
        "type": "string",
        "pattern": "^((a|b)*a(a|b){25}c)*$",
        "minLength": 2001,
    },
    "long strings": {"type": "string", "minLength": 1_000_000},
    "long lists": {"type": "array", "items": {"type": "integer"}, "minItems": 100_000},
    "a multiple": {"type": "integer", "multipleOf": 9973, "minimum": 123456789012},
    "multiples": {"allOf": [{"type": "integer", "multipleOf": n} for n in (997, 991, 983)]},
    "a long enum": {"enum": [f"v{n}" * 4 for n in range(9000)]},
    "many properties": {
        "type": "object",
        "properties": {f"p{n}": {"type": "string"} for n in range(1000)},
    },
    "choices joined": {
        "allOf": [
            {"anyOf": [{"type": "object", "required": [f"p{i}_{j}"]} for j in range(4)]}
            for i in range(20)
        ]
    },
    "references": {
        "$ref": "#/$defs/d0",
        "$defs": {
            **{f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(30)},
            "d30": {"type": "integer"},
        },
    },
    "references joined": {
        "$ref": "#/$defs/d0",
        "$defs": {
            **{f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(30)},
            "d30": {"type": "object"},
        },
    },
    "itself": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_compiled_or_refused_soon_and_no_token_takes_long(name: str) -> None:
    made = grammars()
    began = time.process_time()
    worst_s = 0.0
    try:
        constraint = made.compile(ResponseFormat.json_schema(HOSTILE[name])).start()
        generator = torch.Generator().manual_seed(0)
        for _ in range(100):
            if constraint.finished:
                break
            at = time.process_time()
            allowed = constraint.mask(torch.zeros(VOCABULARY)).isfinite().nonzero().flatten()
            constraint.accept(int(allowed[torch.randint(len(allowed), (1,), generator=generator)]))
            worst_s = max(worst_s, time.process_time() - at)
    except InputError as refused:
        assert "constrained" in str(refused) or "too complex" in str(refused)
    assert time.process_time() - began < 10.0  # all take less than a second on an idle machine
    assert worst_s < 1.0


MULTIPLES = [{"type": "integer", "multipleOf": 9999 - n} for n in range(100)]
ENDLESS: dict[str, Any] = {  # each takes minutes, or gigabytes, where it cannot be ended
    "two of many choices": {"anyOf": MULTIPLES[:2]},
    "thirty choices": {"anyOf": MULTIPLES[:30]},
    "a hundred fields": {"properties": {f"p{n}": one for n, one in enumerate(MULTIPLES)}},
    "items in turns": {"type": "array", "prefixItems": MULTIPLES[:60], "items": False},
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_form_whose_automata_multiply_is_ended_and_the_next_one_has_its_turn_at_once(
    name: str,
) -> None:
    made = grammars()
    own = psutil.Process()
    others = set(own.children())
    before = own.cpu_times()
    with pytest.raises(SchemaError, match="to compile"):
        made.compile(ResponseFormat.json_schema(ENDLESS[name]))
    made.compile(ResponseFormat.json_schema({"const": 1}))
    after = own.cpu_times()
    assert set(own.children()) <= others, "the process that compiled it has ended"
    assert after.user - before.user < 1.0, "nothing of it runs in this process"
    children = after.children_user + after.children_system
    assert children - before.children_user - before.children_system < 4.0


def test_a_form_is_compiled_without_a_thread_to_write_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    long = {"enum": [f"{number:099}" for number in range(900)]}  # more than a pipe holds
    made = grammars()
    others = set(psutil.Process().children())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
        made.compile(ResponseFormat.json_schema(long))
        with pytest.raises(CancelledError):
            made.compile(
                ResponseFormat.json_schema({"const": 2}), check=raising(CancelledError("gone"))
            )
    assert "ragkv-form" in caplog.text
    assert set(psutil.Process().children()) <= others


def test_tools_whose_automata_multiply_are_refused_like_schemas() -> None:
    tool = {"type": "object", "properties": {"n": ENDLESS["thirty choices"]}}
    with pytest.raises(SchemaError, match="to compile"):
        grammars().compile(ResponseFormat.tool_calls({"f": tool}, "tagged"))


def test_a_caller_that_leaves_ends_the_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPILE_S", 60.0)
    monkeypatch.setattr(module, "COMPILE_BYTES", 1 << 40)
    others = set(psutil.Process().children())
    client = Claim(deadline_s=0.0)
    with pytest.raises(DeadlineError):
        grammars().compile(
            ResponseFormat.json_schema(ENDLESS["thirty choices"]), check=client.check
        )
    assert set(psutil.Process().children()) <= others


def test_a_requests_own_deadline_ends_the_compiling_of_its_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "COMPILE_S", 60.0)
    monkeypatch.setattr(module, "COMPILE_BYTES", 1 << 40)
    others = set(psutil.Process().children())
    form = ResponseFormat.json_schema(ENDLESS["thirty choices"])
    with pytest.raises(DeadlineError):
        tiny_engine().answer("a", response_format=form, deadline_s=0.1)
    assert set(psutil.Process().children()) <= others


def test_equal_forms_are_compiled_once_and_the_oldest_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_tried", lambda *_: 1000)
    monkeypatch.setattr(module, "KEPT_BYTES", 2 * (1000 + OVERHEAD_BYTES))
    made = grammars()
    forms = [ResponseFormat.json_schema({"const": n}) for n in range(3)]
    first = made.compile(forms[0])
    assert made.compile(ResponseFormat.json_schema({"const": 0})) is first
    second = made.compile(forms[1])
    made.compile(forms[0])
    made.compile(forms[2])
    assert made.compile(forms[0]) is first, "it was used after the second"
    assert made.compile(forms[1]) is not second


def test_answers_of_one_grammar_are_independent_of_each_other() -> None:
    tokenizer = byte_tokenizer()
    grammar = grammars().compile(ResponseFormat.json_schema({"enum": ["aa", "bb"]}))
    one = grammar.start()
    other = grammar.start()
    for token in tokenizer('"aa', add_special_tokens=False)["input_ids"]:
        one.accept(token)
    assert written(other, tokenizer, VOCABULARY) in ('"aa"', '"bb"')
    assert written(one, tokenizer, VOCABULARY) == '"' and one.complete


def _metaspace() -> Any:
    """As Llama 2: a space is put before every text, by a normalizer, and the decoder removes it
    again.
    """
    pieces = ["▁", *'{}[]":,.-0123456789abcdefghijklmnopqrstuvwxyz', '▁"', '":', "▁1"]
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *pieces]
    ids = {piece: number for number, piece in enumerate(vocabulary)}
    backend = Tokenizer(models.BPE(vocab=ids, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def _reader() -> Any:
    return PreTrainedTokenizerFast.from_pretrained(READER)


@pytest.mark.parametrize("made", [byte_tokenizer, fallback_tokenizer, _metaspace, _reader])
def test_the_text_of_allowed_tokens_has_the_form_with_every_kind_of_tokenizer(made: Any) -> None:
    tokenizer = made()
    vocabulary = len(tokenizer) + 5  # models pad their vocabulary
    form = ResponseFormat.json_schema(
        {
            "type": "object",
            "properties": {
                "a b": {"enum": ["é", "x y"]},
                "n": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["a b", "n"],
            "additionalProperties": False,
        }
    )
    grammar = grammars(tokenizer, vocabulary).compile(form)
    for seed in range(5):
        answer = json.loads(written(grammar.start(), tokenizer, vocabulary, seed))
        assert answer["a b"] in ("é", "x y") and 0 <= answer["n"] <= 99 and len(answer) == 2


def test_a_tokenizer_that_puts_a_space_before_a_text_does_not_force_it_into_answers() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=True, use_regex=False
    )
    constraint = grammars(tokenizer).compile(ResponseFormat.json_schema({"const": {}})).start()
    assert written(constraint, tokenizer, VOCABULARY) == "{}"


def test_an_engine_without_a_usable_tokenizer_is_told_so() -> None:
    with pytest.raises(InputError, match="fast tokenizer"):
        Grammars(ConstraintTokenizer(None, 10, (1,))).compile(ResponseFormat.json_object())
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(InputError, match="end token"):
        grammars(tokenizer).compile(ResponseFormat.json_object())


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r'pip install "ragkv\[structured\]"'):
        grammars().compile(ResponseFormat.json_object())


def test_a_form_is_kept_by_a_process_that_has_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    form = ResponseFormat.json_schema({"type": "object", "properties": {"a": {"type": "string"}}})
    found = grammars()
    # the peak of this process, with torch and models, is above what is kept
    assert psutil.Process().memory_info().rss > module.KEPT_BYTES
    kept = found.compile(form)
    monkeypatch.setattr(module, "_tried", None)  # nothing is compiled again
    assert found.compile(form) is kept and 0 < found.kept.used_bytes < module.KEPT_BYTES


def test_a_form_that_fills_the_pipe_is_written_on_while_its_process_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.001)  # the process has not begun to read by then
    schema = json.dumps({"type": "string", "description": "word " * 40_000})
    assert len(schema) > 2 * 65_536
    assert module._tried([("schema", schema)], no_check) >= len(schema)


def test_a_process_that_ends_before_it_has_read_all_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop() -> None:
        raise CancelledError("The client left.")

    monkeypatch.setattr(module, "POLL_S", 0.001)
    with pytest.raises(CancelledError):
        module._tried([("schema", "x" * 1_000_000)], stop)
    assert not [one for one in threading.enumerate() if "_give" in one.name]
