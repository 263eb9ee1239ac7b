"""What the defaults are compared with, on a small model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

defaults = pytest.importorskip("benchmarks.defaults")
from benchmarks import anchors, default_ways  # noqa: E402
from benchmarks.default_ways import LAYOUTS, STUDIES, Asker, Unweighed, Way  # noqa: E402
from benchmarks.real_sets import Asked  # noqa: E402
from ragkv.fusion import Candidates  # noqa: E402
from ragkv.fusion.selectors import Attention  # noqa: E402
from tests.engine.helpers import text_engine  # noqa: E402
from tests.reader import READER  # noqa: E402

TEXTS = (
    "Acme makes ships. It lies in the north of the country, by the sea.",
    "Dana leads Acme, says the register of firms that was printed last year.",
    "The north is cold. Its people build boats of wood and sell them in the south.",
)
ASKED = Asked("q", TEXTS, "Who leads Acme?", ("Dana",))


def test_layouts_keep_all_text_and_put_the_passage_that_answers_first_or_last() -> None:
    with text_engine() as engine:
        assert tuple(LAYOUTS["as they come"](engine, ASKED)) == TEXTS
        assert LAYOUTS["best first"](engine, ASKED) == [TEXTS[1], TEXTS[0], TEXTS[2]]
        assert LAYOUTS["best last"](engine, ASKED) == [TEXTS[0], TEXTS[2], TEXTS[1]]
        (whole,) = LAYOUTS["cut at 512"](engine, ASKED)
        assert whole == "\n\n".join(TEXTS)


def test_an_alternative_weighs_attention_the_same_everywhere_in_a_chunk() -> None:
    candidates = Candidates(torch.arange(6), torch.tensor([0, 1, 2, 0, 1, 2]))
    later = torch.tensor([0.1, 0.1, 0.105, 0.1, 0.1, 0.105])
    assert Unweighed().select_asked(candidates, later, 0.3).tolist() == [2, 5]
    assert Attention().select_asked(candidates, later, 0.3).tolist() == [0, 3]


def test_so_much_of_the_first_passage_is_computed_as_its_way_says() -> None:
    with text_engine() as engine:
        chunks = [engine.chunk(text) for text in TEXTS]
        engine.entries.encode(chunks)
        ways = (Way("first", leading_tokens=1), Way("all", leading_tokens=default_ways.EVERY_TOKEN))
        first, whole = (
            default_ways.served(engine, ASKED.question, chunks, way).reuse for way in ways
        )
        assert whole.fused < first.fused and first.computed < whole.computed


def test_two_rounds_choose_as_many_tokens_as_one() -> None:
    with text_engine() as engine:
        chunks = [engine.chunk(text) for text in TEXTS]
        engine.entries.encode(chunks)
        one = default_ways.served(engine, ASKED.question, chunks, Way("one"))
        two = default_ways.served(engine, ASKED.question, chunks, Way("two", first_share=0.5))
        assert len(two.selected) == len(one.selected)
        whole = default_ways.served(engine, ASKED.question, chunks, Way("1", first_share=1.0))
        assert whole.selected.tolist() == one.selected.tolist(), "nothing is left to the second"


def test_over_all_of_every_chunk_anchors_are_asked_as_all_are() -> None:
    with text_engine() as engine:
        chunks = [engine.chunk(text) for text in TEXTS]
        engine.entries.encode(chunks)
        asking = default_ways.Remembering()
        wanted = engine.prefill(ASKED.question, chunks, selector=asking, ratio=0.15)
        found = anchors.asked_over_anchors(engine, ASKED.question, chunks, 1.0, 0.15)
        assert found.selected.tolist() == wanted.selected.tolist()
        some = anchors.asked_over_anchors(engine, ASKED.question, chunks, 0.2, 0.15)
        assert len(some.selected) == len(wanted.selected)
        starts = {span.chunk: span.start for span in reversed(some.spans) if span.chunk is not None}
        allowed = {
            start + int(one)
            for chunk, start in starts.items()
            for one in anchors.anchors_of(engine, chunks[chunk], 0.2)
        }
        assert set(some.selected.tolist()) <= allowed


def test_the_attention_of_a_prefilled_prompt_is_what_the_question_asked_with() -> None:
    with text_engine() as engine:
        chunks = [engine.chunk(text) for text in TEXTS]
        prefill = engine.prefill(ASKED.question, chunks, reuse="none")
        length = len(prefill.token_ids)  # what is behind is not written
        before = [layer[:, :, :length].clone() for layer in prefill.kv.keys]
        rows = len(engine.token_ids(ASKED.question))
        found = default_ways.attention_of_last(engine, prefill, rows)
        assert found.shape == prefill.token_ids.shape
        assert float(found.sum()) == pytest.approx(1.0, abs=1e-5)
        # The rows' own KV is written again by passes of another shape, hence not bit for bit.
        for written, layer in zip(before, prefill.kv.keys, strict=True):
            torch.testing.assert_close(layer[:, :, :length], written, rtol=0, atol=1e-5)


def test_every_study_compares_its_default_with_something() -> None:
    for study in STUDIES.values():
        names = [way.name for way in study.ways]
        assert study.default in names and len(names) > 1 and len(set(names)) == len(names)


def test_each_way_is_compared_with_the_full_prefill_of_its_own_prompt() -> None:
    with text_engine() as base, Asker(base, ["order", "neutral"]) as asker:
        rows = {row["way"]: row for row in asker.ask(ASKED)}
        known = list(asker.ask(ASKED, known=set(rows) - {"best last"}))
    assert [row["way"] for row in known] == ["best last"]
    assert known[0]["kl"] == pytest.approx(rows["best last"]["kl"], abs=1e-6)
    assert rows["best first"]["full_gold"] != rows["best last"]["full_gold"]


def test_a_table_is_of_questions_that_were_asked_in_all_ways_and_differences_are_paired() -> None:
    def row(question: str, way: str, kl: float) -> dict[str, Any]:
        values = {"kl": kl, "gold": -kl, "full_gold": 0.0, "compute": 0.2}
        return {"set": "six", "question": question, "way": way, **values}

    rows = [row("a", "best first", 0.3), row("a", "best last", 0.1), row("b", "best last", 9.0)]
    first, last = defaults.summarized(rows, STUDIES["order"])
    assert (first["n"], first["kl"]) == (1, 0.3)
    assert first["more_kl"] == pytest.approx([0.2, 0.2, 0.2])
    assert last["more_kl"] == [0.0, 0.0, 0.0]


def test_a_run_that_was_killed_goes_on(tmp_path: Path) -> None:
    articles = [
        {
            "title": f"Article {number}",
            "paragraphs": [
                {
                    "context": f"Firm {number}.{place} is old. Dana{place} leads it. It makes ships.",
                    "qas": [
                        {
                            "id": f"{number}-{place}",
                            "question": f"Who leads firm {place}?",
                            "answers": [{"text": f"Dana{place}"}],
                        }
                    ],
                }
                for place in range(5)
            ],
        }
        for number in range(12)
    ]
    (tmp_path / "xquad.en.json").write_text(json.dumps({"data": articles}))
    out = tmp_path / "rows.jsonl"
    given = ("--model", READER, "--data", str(tmp_path), "--out", str(out), "--studies", "order")
    table = defaults.run(defaults._options([*given, "--questions", "2"]))
    assert "| six | best first | 2 |" in table
    rows = out.read_text().splitlines(keepends=True)
    out.write_text("".join(rows[:-1]))
    again = defaults.run(defaults._options([*given, "--questions", "2"]))
    assert "| six | best last | 2 |" in again
    assert len(out.read_text().splitlines()) == len(rows)
    assert defaults.run(defaults._options([*given, "--tables"])) == again
