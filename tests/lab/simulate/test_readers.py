"""Readers of published traces: tiny files counted by hand, and the real traces where they are available."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from ragkv.errors import InputError
from ragkv.lab.simulate import Trace, read_rag_requests, read_trace

REAL = Path(__file__).parents[4] / "shared" / "data" / "traces"


def lines(path: Path, values: Iterable[Any]) -> Path:
    text = "".join(json.dumps(value) + "\n" for value in values)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def rows(trace: Trace) -> list[tuple[float, str, int, int, int]]:
    return [(turn.at, turn.group, turn.prompt, turn.shared, turn.length) for turn in trace.turns]


def mooncake(at_ms: int, prompt: int, response: int, hashes: list[int]) -> dict[str, Any]:
    return {"timestamp": at_ms, "input_length": prompt, "output_length": response, "hash_ids": hashes}


class TestMooncake:
    def test_a_mooncake_request_that_repeats_a_conversations_blocks_belongs_to_it(self, tmp_path: Path) -> None:
        path = lines(
            tmp_path / "m.jsonl",
            [
                mooncake(0, 1100, 100, [0, 1, 2]),
                mooncake(1000, 600, 10, [7, 8]),
                mooncake(2000, 1800, 50, [0, 1, 3, 4]),  # both full blocks of the first, and long enough
            ],
        )
        assert rows(read_trace(path, 512)) == [(0, "m0", 3, 0, 2), (1, "m1", 2, 0, 1), (2, "m0", 4, 2, 3)]

    def test_mooncake_blocks_whose_hashes_differ_are_not_shared(self, tmp_path: Path) -> None:
        path = lines(tmp_path / "m.jsonl", [mooncake(0, 2048, 512, [0, 1, 2, 3]), mooncake(0, 2048, 0, [0, 1, 5, 6])])
        assert rows(read_trace(path, 512))[1] == (0, "m0", 4, 2, 4)

    def test_a_common_preamble_does_not_join_mooncake_requests_to_one_conversation(self, tmp_path: Path) -> None:
        path = lines(tmp_path / "m.jsonl", [mooncake(i, 1024, 0, [0, 100 + i]) for i in range(70)])
        assert len({turn.group for turn in read_trace(path, 512).turns}) == 70


def test_agent_conversations_may_contract_and_sub_agents_are_separate_conversations(tmp_path: Path) -> None:
    inner = [{"t": 0.0, "in": 64, "out": 0, "hash_ids": [9]}]
    requests = [
        {"t": 0.0, "in": 192, "out": 64, "hash_ids": [1, 2, 3]},
        {"t": 1.0, "type": "subagent", "requests": inner},
        {"t": 2.0, "in": 128, "out": 0, "hash_ids": [1, 5]},
    ]
    path = lines(tmp_path / "a.jsonl.gz", [{"id": "x", "block_size": 64, "requests": requests}])
    assert [row[1:] for row in rows(read_trace(path, 64))] == [("x", 3, 0, 4), ("x/1", 1, 0, 1), ("x", 2, 1, 2)]


@pytest.fixture
def ragpulse(tmp_path: Path) -> Path:
    lines(tmp_path / "1_sys_prompt.jsonl", [{"sys_prompt_id": 1, "token_length": 10}])
    lines(tmp_path / "2_passages.jsonl", [{"passage_id": n, "token_length": 20} for n in (5, 6)])
    lines(tmp_path / "3_history.jsonl", [])
    lines(tmp_path / "4_user_input.jsonl", [{"user_input_id": n, "token_length": 3} for n in (8, 9)])
    lines(tmp_path / "5_web_search.jsonl", [])

    def request(at: int, passages: list[int], user: int) -> dict[str, Any]:
        ids = {"sys_prompt": [1], "passages_ids": passages, "user_input": [user]}
        return {"timestamp": str(at), "session_id": "s", "hash_ids": ids, "output_length": 7}

    lines(tmp_path / "0_trace.jsonl", [request(9, [5, 6], 8), request(4, [5], 9)])
    return tmp_path


class TestRAGPulse:
    def test_ragpulse_requests_are_read_in_order_of_time_with_their_parts(self, ragpulse: Path) -> None:
        first, second = read_rag_requests(ragpulse)
        assert (first.at, first.tokens) == (4, 33)
        assert [part.number for part in second.parts] == [1, 5, 6, 8]

    def test_ragpulse_sessions_share_equal_parts_from_the_start_of_the_prompt(self, ragpulse: Path) -> None:
        assert rows(read_trace(ragpulse, 10)) == [(4, "s", 4, 0, 4), (9, "s", 6, 3, 6)]

    def test_a_ragpulse_request_with_an_unknown_part_is_refused(self, ragpulse: Path) -> None:
        lines(ragpulse / "2_passages.jsonl", [{"passage_id": 5, "token_length": 20}])
        with pytest.raises(InputError, match="unknown part"):
            read_rag_requests(ragpulse)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("m.jsonl", "{", "line 1: no JSON"),
        ("m.jsonl", '{"timestamp": 0}', "line 1: lacks input_length"),
        ("m.jsonl", "[]", "line 1: lacks"),
        ("m.txt", "", "no known trace"),
    ],
)
def test_a_malformed_trace_is_refused_naming_the_line_and_the_fault(
    tmp_path: Path, name: str, text: str, says: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=says):
        read_trace(tmp_path / name)


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no trace at"):
        read_trace(tmp_path / "nowhere.csv")


@pytest.mark.skipif(not REAL.is_dir(), reason="the published traces are not part of this repository")
@pytest.mark.parametrize(
    ("name", "requests"),
    [
        ("mooncake/conversation_trace.jsonl", 12_031),
        ("kv-cache-tester/sample_120.jsonl.gz", 3_768),
        ("ragpulse", 7_106),
    ],
)
def test_all_requests_of_the_published_traces_are_read(name: str, requests: int) -> None:
    assert len(read_trace(REAL / name).turns) == requests
