"""The reader of RAGPulse: tiny files counted by hand, and the real trace where it is available."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from ragkv.errors import InputError
from ragkv.lab.simulate import Trace, load_trace, read_rag_requests

REAL = Path(__file__).parents[4] / "shared" / "data" / "traces" / "ragpulse"


def lines(path: Path, values: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def rows(trace: Trace) -> list[tuple[float, str, int, int, int]]:
    return [(turn.at, turn.group, turn.prompt, turn.shared, turn.length) for turn in trace.turns]


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
        assert rows(load_trace(str(ragpulse), 10)) == [(4, "s", 4, 0, 4), (9, "s", 6, 3, 6)]

    def test_a_ragpulse_request_with_an_unknown_part_is_refused(self, ragpulse: Path) -> None:
        lines(ragpulse / "2_passages.jsonl", [{"passage_id": 5, "token_length": 20}])
        with pytest.raises(InputError, match="unknown part"):
            read_rag_requests(ragpulse)


@pytest.mark.parametrize(
    ("text", "says"), [("{", "line 1: no JSON"), ('{"t": 0}', "line 1: lacks"), ("[]", "line 1: lacks")]
)
def test_a_malformed_trace_is_refused_naming_the_line_and_the_fault(ragpulse: Path, text: str, says: str) -> None:
    (ragpulse / "0_trace.jsonl").write_text(text)
    with pytest.raises(InputError, match=says):
        load_trace(str(ragpulse), 16)


@pytest.mark.parametrize(("name", "says"), [("nowhere.csv", "no trace at"), ("m.txt", "no known trace")])
def test_a_missing_or_unknown_trace_is_refused(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "m.txt").touch()
    with pytest.raises(InputError, match=says):
        load_trace(str(tmp_path / name), 16)


@pytest.mark.skipif(not REAL.is_dir(), reason="the published trace is not part of this repository")
def test_all_requests_of_the_published_trace_are_read() -> None:
    assert len(load_trace(str(REAL), 16).turns) == 7_106
