"""Routing: what a request names decides, load is bounded, and few keys move when a replica
leaves.
"""

import json
from collections import Counter
from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.api import ServeConfig
from ragkv.cluster.ray.routing import LOAD_FACTOR, PARSED_BYTES, home, rank, routing_key
from ragkv.errors import ConfigError

NAMES = ("a", "b", "c", "d")
IDLE = dict.fromkeys(NAMES, 0)
JSON = {"content-type": "application/json"}


def key_of(path: str, body: Any = None, **headers: str) -> str:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return routing_key(path, {**JSON, **named}, b"" if body is None else json.dumps(body).encode())


def test_a_session_id_counts_the_same_in_path_and_body() -> None:
    named = key_of("/v1/ask", {"question": "q", "session_id": "s"})
    assert named and named == key_of("/v1/sessions/s") == key_of("/v1/sessions/s/fork", {})
    assert named != key_of("/v1/ask", {"question": "q", "session_id": "t"})
    assert named != key_of("/v1/ask", {"session_id": "s"}, authorization="Bearer other")


def test_a_conversation_without_a_name_is_identified_by_its_first_messages() -> None:
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    later = [*first, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "And?"}]
    begun, continued = (key_of("/v1/chat/completions", {"messages": m}) for m in (first, later))
    assert begun == continued != key_of("/v1/chat/completions", {"messages": later[2:]})


def test_documents_in_a_request_are_identified_by_their_texts_in_any_order() -> None:
    documents = [{"text": "a"}, {"text": "b"}]
    named = key_of("/v1/chat/completions", {"messages": [], "documents": documents})
    assert named == key_of("/v1/chat/completions", {"messages": [], "documents": documents[::-1]})
    assert named != key_of("/v1/chat/completions", {"messages": [], "documents": documents[:1]})


def test_a_question_without_a_conversation_is_identified_by_caller_and_collection() -> None:
    asked = key_of("/v1/ask", {"question": "q"})
    assert asked and asked == key_of("/v1/ask", {"question": "other", "collection": "default"})
    assert asked != key_of("/v1/ask", {"question": "q", "collection": "docs"})
    assert asked != key_of("/v1/ask", {"question": "q"}, authorization="Bearer other")


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"[" * PARSED_BYTES,
        b'{"messages": 3}',
        b'{"documents": [{}]}',
        b'{"messages": [1]}',
        b"\xff",
    ],
)
@pytest.mark.parametrize("path", ["/v1/ask", "/v1/chat/completions", "/"])
def test_an_invalid_request_names_nothing_and_raises_no_error(path: str, body: bytes) -> None:
    assert routing_key(path, JSON, body) == ""


def test_a_key_goes_to_its_home_unless_that_has_too_much_to_do() -> None:
    own = home("x", NAMES)
    ones = dict.fromkeys(NAMES, 1)
    assert rank("x", IDLE)[0] == rank("x", ones)[0] == own
    assert rank("x", {**ones, own: 9})[0] != own


def test_a_request_that_names_nothing_goes_to_the_least_loaded_replica() -> None:
    assert rank("", dict(a=2, b=1, c=3)) == ["b", "a", "c"]


def test_a_replica_that_leaves_moves_only_its_own_keys() -> None:
    for number in range(200):
        kept = home(f"k{number}", NAMES)
        others = tuple(name for name in NAMES if name == kept or name != NAMES[number % 4])
        assert home(f"k{number}", others) == kept


def test_the_homes_of_keys_are_spread_evenly_over_replicas() -> None:
    went = Counter(home(f"k{number}", NAMES) for number in range(4_000))
    assert min(went.values()) > 900 and max(went.values()) < 1_100


def test_an_unknown_router_is_refused() -> None:
    with pytest.raises(ConfigError, match="sticky"):
        ServeConfig.gather(None, {"RAGKV_SERVE__CLUSTER__ROUTER": "chunk-aware"})


@given(key=st.sampled_from(["", *"uvwxyz"]), loads=st.lists(st.integers(0, 9), max_size=4))
def test_every_replica_is_ranked_once(key: str, loads: list[int]) -> None:
    replicas = dict(zip(NAMES, loads, strict=False))
    assert sorted(rank(key, replicas)) == sorted(replicas)


@given(keys=st.lists(st.sampled_from(["", *"uvwxyz"]), min_size=1, max_size=60))
def test_loads_stay_within_the_limit_while_no_request_finishes(keys: list[str]) -> None:
    loads = dict(IDLE)
    for served, key in enumerate(keys, 1):
        name = rank(key, loads)[0]
        loads[name] += 1
        assert loads[name] <= ceil(LOAD_FACTOR * served / len(NAMES))
