"""Traces of requests as published, each small enough to count by hand."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulate import load_trace
from ragkv.errors import RagKVError

ASKED = [  # with what is to be read of each, in blocks of 512
    ((0, 1100, 500, [0, 1, 2]), ("m0", 3, 0, 3)),
    ((1000, 600, 10, [7, 8]), ("m1", 2, 0, 1)),
    ((2000, 1100, 500, [0, 1, 2]), ("m0", 3, 2, 3)),  # the same again: its answer is not in it
    ((3000, 1800, 50, [0, 1, 3, 4]), ("m0", 4, 3, 3)),  # long enough to hold the answer
    ((4000, 2500, 0, [0, 1, 5, 6, 9]), ("m0", 5, 2, 4)),  # its hashes confirm two blocks
]
AGENTS = [
    {"t": 0.0, "in": 192, "out": 64, "hash_ids": [1, 2, 3]},
    {"t": 1.0, "type": "subagent", "requests": [{"t": 0.0, "in": 64, "out": 0, "hash_ids": [9]}]},
    {"t": 2.0, "in": 128, "out": 0, "hash_ids": [1, 5]},
]


def rows(path: Path, values: Iterable[Any], block: int) -> list[tuple[str, int, int, int]]:
    text = "".join(json.dumps(value) + "\n" for value in values)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    where = path.parent if path.name.startswith("0_") else path
    return [
        (turn.group, turn.prompt, turn.shared, turn.length)
        for turn in load_trace(str(where), block).turns
    ]


def mooncake(asked: Iterable[tuple[int, int, int, list[int]]]) -> list[dict[str, Any]]:
    return [
        dict(zip(("timestamp", "input_length", "output_length", "hash_ids"), one, strict=True))
        for one in asked
    ]


def test_a_request_of_mooncake_continues_the_conversation_whose_blocks_it_repeats(
    tmp_path: Path,
) -> None:
    asked, expected = zip(*ASKED, strict=True)
    assert rows(tmp_path / "m.jsonl", mooncake(asked), 512) == list(expected)
    preamble = [(at, 1024, 0, [0, 100 + at]) for at in range(70)]
    assert len({group for group, *_ in rows(tmp_path / "m.jsonl", mooncake(preamble), 512)}) == 70


def test_agents_contract_and_sub_agents_are_conversations_of_their_own(tmp_path: Path) -> None:
    found = rows(tmp_path / "a.jsonl.gz", [{"id": "x", "block_size": 64, "requests": AGENTS}], 64)
    assert found == [("x", 3, 0, 4), ("x/1", 1, 0, 1), ("x", 2, 1, 2)]


def test_sessions_of_ragpulse_share_equal_parts_from_the_start(tmp_path: Path) -> None:
    for name, field, sizes in (
        ("1_s", "sys_prompt_id", {1: 10}),
        ("2_p", "passage_id", {5: 20, 6: 20, 8: 3, 9: 3}),
    ):
        lines = [
            json.dumps({field: number, "token_length": size}) + "\n"
            for number, size in sizes.items()
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    asked = [
        {
            "timestamp": at,
            "session_id": "s",
            "hash_ids": {"sys_prompt": [1], "passages_ids": ids},
            "output_length": 7,
        }
        for at, ids in (("9", [5, 6, 8]), ("4", [5, 9]))
    ]
    assert rows(tmp_path / "0_trace.jsonl", asked, 10) == [("s", 4, 0, 4), ("s", 6, 3, 6)]


@pytest.mark.parametrize("text", ['{"hash_ids": [1]}', '{"requests": [{}]}', "3", "{", ""])
def test_what_is_no_trace_is_refused_in_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.jsonl").write_text(text)
    with pytest.raises(RagKVError, match=r"The trace .*m.jsonl") as error:
        load_trace(str(tmp_path / "m.jsonl"), 16)
    assert "\n" not in str(error.value)
