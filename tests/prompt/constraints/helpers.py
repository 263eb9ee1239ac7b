"""Shared by the tests of constrained answers: a tiny engine with random weights, and random
schemas.
"""

import functools
from typing import Any

import torch
import transformers
from hypothesis import strategies as st

from ragkv import Engine, EngineConfig, StoreConfig
from tests import tiny_models
from tests.fixed import fixed
from tests.prompt.test_template import CHATML
from tests.toy_tokenizers import VOCABULARY, byte_tokenizer


@functools.cache
def tiny_engine() -> Engine:
    """Random weights and a byte tokenizer: what it says is noise, so only the constraint gives an
    answer its form.
    """
    torch.manual_seed(7)
    config = tiny_models.config("llama", vocab_size=VOCABULARY, max_position_embeddings=8192)
    model = transformers.LlamaForCausalLM(config).eval()
    settings = EngineConfig(store=StoreConfig(memory_bytes=1 << 24), fusion=fixed())
    return Engine(model, byte_tokenizer(CHATML), settings)


NAMES = st.sampled_from(["a", "b", "name", "the year", "é", 'q"uote'])
NUMBERS = st.integers(-50, 50)
_TEXTS = st.text('ab cé"\\\n/', max_size=5)


def _bounded(kind: str, low: str, high: str, most: int) -> st.SearchStrategy[dict[str, Any]]:
    def of(bounds: tuple[int, int]) -> dict[str, Any]:
        return {"type": kind, low: min(bounds), high: max(bounds)}

    return st.tuples(st.integers(0, most), st.integers(0, most)).map(of)


_INTEGERS = st.tuples(NUMBERS, NUMBERS).map(
    lambda b: {"type": "integer", "minimum": min(b), "maximum": max(b)}
)
_LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    _INTEGERS,
    st.integers(2, 12).map(
        lambda n: {"type": "integer", "multipleOf": n, "minimum": 0, "maximum": 99}
    ),
    st.just({"type": "number", "minimum": -1, "exclusiveMaximum": 9.5}),
    _bounded("string", "minLength", "maxLength", 6),
    st.sampled_from(["^[a-c]{2,4}$", "^(x|yy)$", "[0-9]"]).map(
        lambda pattern: {"type": "string", "pattern": pattern, "maxLength": 8}
    ),
    st.sampled_from(["date", "time", "ipv4", "uuid"]).map(
        lambda name: {"type": "string", "format": name}
    ),
    st.lists(st.one_of(_TEXTS, NUMBERS, st.booleans(), st.none()), min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
    st.one_of(_TEXTS, NUMBERS, st.just([1, {"b": 2, "a": None}])).map(
        lambda value: {"const": value}
    ),
)


@st.composite
def _objects(draw: Any, inner: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, inner, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    more: Any = draw(st.sampled_from([False, {"type": "boolean"}]))
    schema = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": more,
    }
    # the number of properties is kept only then
    bounded = more and len(required) == len(properties)
    return schema | ({"maxProperties": len(properties) + 1} if bounded else {})


@st.composite
def _arrays(draw: Any, inner: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    least = draw(st.integers(0, 2))
    schema = {
        "type": "array",
        "items": draw(inner),
        "minItems": least,
        "maxItems": least + draw(st.integers(0, 2)),
    }
    return schema | ({"prefixItems": [draw(inner)]} if draw(st.booleans()) else {})


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


_SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        _arrays(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda many: {"anyOf": many}),
        inner.map(_nullable),
        inner.map(
            lambda one: (
                {"$ref": "#/$defs/one", "$defs": {"one": one}} if "$defs" not in str(one) else one
            )
        ),
    ),
    max_leaves=6,
)
# A `$ref` reads the definitions of the whole schema, so one that refers stands alone.
schemas = _SCHEMAS.filter(lambda schema: "$defs" not in str(schema) or "$defs" in schema)
