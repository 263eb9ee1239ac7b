"""Traces: the CSV format, its errors, and what is known of a trace before any replay."""

from pathlib import Path

import pytest

from benchmarks.simulate import BirthDeath, ShareGPTLike, Trace, TraceRow, read_rows
from ragkv.errors import InputError
from ragkv.store.policies import NEVER, NextRequest

HEADER = "t,request,conversation,in,sh,L\n"
TINY = [
    TraceRow(0, 0, "A", 3, 0, 4),
    TraceRow(1, 1, "B", 2, 0, 2),
    TraceRow(5, 2, "A", 6, 4, 7),
    TraceRow(6, 3, "A", 8, 5, 9),
]


def test_a_trace_is_read_from_its_csv_format(tmp_path: Path) -> None:
    rows = "".join(",".join(map(str, row)) + "\n" for row in TINY)
    (tmp_path / "rows.csv").write_text(HEADER + rows)
    assert read_rows(tmp_path / "rows.csv", 16) == Trace.of(TINY, 16, "rows.csv")


def test_a_trace_gives_each_turn_its_number_gap_and_next_request() -> None:
    a1, b, a2, a3 = Trace.of(TINY, 16).turns
    assert (a1.number, a1.since, a1.next) == (1, None, NextRequest(2, 6, 4))
    assert (a2.number, a2.since, a2.next) == (2, 5, NextRequest(3, 8, 5))
    assert (a3.number, a3.since, a3.next) == (3, 1, NEVER)
    assert b.next is NEVER


def test_rows_are_replayed_in_order_of_time_then_request_number() -> None:
    rows = [
        TraceRow(1, 2, "A", 1, 0, 1),
        TraceRow(1, 1, "B", 1, 0, 1),
        TraceRow(0, 3, "C", 1, 0, 1),
    ]
    assert [turn.group for turn in Trace.of(rows, 16).turns] == ["C", "B", "A"]


def test_the_expected_new_blocks_are_the_rounded_up_mean_over_later_turns() -> None:
    assert Trace.of(TINY, 16).expected_new_blocks == 3  # (2 + 3) / 2
    assert Trace.of(TINY[:2], 16).expected_new_blocks == 0


def test_peak_live_counts_returning_conversations() -> None:
    trace = Trace.of([*TINY, TraceRow(7, 4, "A", 1, 1, 1)], 16)  # A contracts at last
    assert trace.peak_live == 9


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("t,request,conversation,in,L\n0,0,A,1,1\n", "lacks the column.* sh"),
        ("", "lacks the column"),
        (HEADER, "has no requests"),
        (HEADER + "0,0,A,1,0\n", "line 2"),
        (HEADER + "0,0,A,1,0,1\n1,1,A,one,0,1\n", "line 3.*one"),
        (HEADER + "0,0,A,-1,0,1\n", "line 2.*must not be negative"),
        (HEADER + "-1,0,A,1,0,1\n", "line 2.*must not be negative"),
        (HEADER + "nan,0,A,1,0,1\n", "line 2.*must not be negative"),
        (HEADER + "0,0,A,1,2,1\n", "sh is 2, more than the 1 blocks"),
        (HEADER + "0,0,A,1.5,0,1\n", "line 2"),
    ],
)
def test_a_malformed_csv_is_refused_in_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(InputError, match=says) as error:
        read_rows(tmp_path / "rows.csv", 16)
    assert "\n" not in str(error.value)


def test_birth_death_conversations_have_the_turns_and_gaps_of_their_rates() -> None:
    trace = BirthDeath(requests=20_000).trace(16)
    assert len(trace.turns) / len({turn.group for turn in trace.turns}) == pytest.approx(
        4, rel=0.06
    )
    turns, ends = trace.rates
    assert turns == pytest.approx(1 / 60, rel=0.05)
    assert ends == pytest.approx(1 / 180, rel=0.1)


def test_sharegpt_like_sessions_have_the_turn_counts_and_lengths_of_the_paper() -> None:
    sessions = ShareGPTLike(sessions=5_000).draw()
    assert sum(len(session.turns) for session in sessions) / 5_000 == pytest.approx(5.75, rel=0.05)
    assert sum(len(session.turns) > 1 for session in sessions) / 5_000 == pytest.approx(
        0.73, rel=0.05
    )
    long = sum(sum(new + out for new, out, _ in session.turns) > 4096 for session in sessions)
    assert long / 5_000 == pytest.approx(0.30, rel=0.1)
