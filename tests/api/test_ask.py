"""/v1/ask gives the engine's answer with sources and report."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from ragkv import Engine, EngineConfig
from ragkv.api.bodies.resources import SourceBody
from ragkv.api.sources import citations_of, cited_sources
from ragkv.config import R_STAR
from ragkv.rag import Corpus, Rag
from ragkv.retrieval import Document
from tests.retrieval import sample_files
from tests.retrieval.fakes import HashEmbedder

from .helpers import corpus, events, filled, questions

ASKED = {"question": "Who built the harbour of Oro?", "collection": "facts"}


def ask(client: TestClient, **more: Any) -> Any:
    response = client.post("/v1/ask", json={**ASKED, **more})
    assert response.status_code == 200, response.text
    return response.json()


def test_ask_gives_the_engines_own_answer(client: TestClient, reader: Engine) -> None:
    client.post("/v1/collections", json={"name": "world"})
    client.post("/v1/collections/world/documents", files=corpus())
    with (
        reader.with_config(EngineConfig()) as engine,
        Rag(Corpus(engine, None, embedder=HashEmbedder())) as rag,
    ):
        rag.corpus.ingest(Document(name, data.decode(), name) for _, (name, data) in corpus())
        for one in questions()[:6]:
            own = rag.ask(one["question"])
            got = ask(client, question=one["question"], collection="world")
            assert got["answer"] == own.answer.text
            assert [source["text"] for source in got["sources"]] == [
                hit.passage.text for hit in own.hits
            ]
            assert got["reuse"]["recomputed"] == own.answer.reuse.recomputed
            assert [citation["number"] - 1 for citation in got["citations"]] == [
                c.chunk for c in own.answer.citations
            ]


def test_prompt_spans_sum_to_the_reuse_counts_and_name_their_sources(client: TestClient) -> None:
    filled(client)
    got = ask(client)
    of = {
        state: sum(span["tokens"] for span in got["prompt"] if span["state"] == state)
        for state in ("exact", "fused", "computed")
    }
    recomputed = sum(len(span["recomputed_at"]) for span in got["prompt"])
    reuse = got["reuse"]
    assert of == {
        "exact": reuse["exact"],
        "fused": reuse["fused"] + recomputed,
        "computed": reuse["computed"],
    }
    assert recomputed == reuse["recomputed"]
    assert [span["number"] for span in got["prompt"] if span["kind"] == "chunk"] == [1, 2]
    assert sum(of.values()) == reuse["tokens"]


def test_a_stream_sends_sources_prompt_tokens_and_the_whole_answer(client: TestClient) -> None:
    filled(client)
    whole = ask(client)
    told = events(client.post("/v1/ask", json={**ASKED, "stream": True}).text)
    names = [name for name, _ in told]
    assert names[:2] == ["sources", "prompt"] and names[-1] == "answer"
    assert set(names[2:-1]) == {"token"}
    assert "".join(data["text"] for name, data in told if name == "token") == whole["answer"]
    assert told[0][1]["sources"] == whole["sources"]
    last = told[-1][1]
    assert (
        last["answer"] == whole["answer"]
        and last["prompt"] == whole["prompt"] == told[1][1]["prompt"]
    )


def test_the_request_chooses_reuse_ratio_and_selector(client: TestClient) -> None:
    filled(client)
    assert ask(client, reuse="none")["reuse"]["exact"] == 0
    assert ask(client, reuse="prefix")["reuse"]["fused"] == 0
    assert ask(client, ratio=0.0)["reuse"]["recomputed"] == 0
    assert ask(client, ratio=1.0)["reuse"]["fused"] == 0
    assert ask(client, ratio=1.0)["answer"] == ask(client, reuse="none")["answer"]
    assert ask(client, selector="first-k")["reuse"]["selector"] == "first-k"
    left_out = ask(client)["reuse"]
    assert left_out["ratio"] == R_STAR
    assert left_out["decision"] == []  # the tests' default is a fixed ratio
    # the load controller was asked
    assert "profile" in ask(client, ratio=None)["reuse"]["decision"][0]


@pytest.mark.parametrize(
    ("changed", "status", "param"),
    [
        ({"collection": "nowhere"}, 404, "collection"),
        ({"k": 65}, 400, "k"),
        ({"k": 0}, 400, "k"),
        ({"k": "6"}, 400, "k"),
        ({"stream": 1}, 400, "stream"),
        ({"question": ""}, 400, "question"),
        ({"question": "x" * 100_001}, 400, "question"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"ratio": 1.5}, 400, "ratio"),
        ({"reuse": "some"}, 400, "reuse"),
        ({"questoin": "?"}, 400, "questoin"),
        ({"session_id": "../../etc"}, 400, "session_id"),
        ({"selector": "nothing-known"}, 400, None),
        ({"retriever": "nothing-known"}, 400, None),
        ({"retriever": ""}, 400, None),
        ({"selector": ""}, 400, None),
        ({"order": ""}, 400, "order"),
        ({"filter": {"n": {"about": 1}}}, 400, None),
        ({"max_tokens": 1000, "question": "harbour " * 1500}, 400, None),
    ],
)
def test_a_wrong_ask_request_is_refused_and_names_the_field(
    client: TestClient, changed: dict[str, Any], status: int, param: str | None
) -> None:
    filled(client)
    response = client.post("/v1/ask", json={**ASKED, **changed})
    assert (response.status_code, response.json()["error"]["param"]) == (status, param), (
        response.text
    )


def test_sources_and_citations_of_a_document_with_pages_name_the_page(client: TestClient) -> None:
    pytest.importorskip("pypdf", reason="needs pypdf (extra pdf)")
    client.post("/v1/collections", json={"name": "pages"})
    data = sample_files.pdf("Nesibissa is a librarian.", "Nesibissa lives in Irvburg.")
    client.post("/v1/collections/pages/documents", files=[("files", ("two.pdf", data))])
    client.post(
        "/v1/collections/pages/documents",
        files=[("files", ("plain.txt", b"Irvburg lies on a river."))],
    )
    sources = ask(client, question="Where does Nesibissa live?", collection="pages")["sources"]
    assert {(source["document_id"], source["page"]) for source in sources} == {
        ("plain.txt", None),
        ("two.pdf", 1),
    }
    given = [SourceBody(**source) for source in sources]
    cited = citations_of("Irvburg", given, cited_sources("Irvburg", given))
    assert {(one.document_id, one.page) for one in cited} == {("plain.txt", None), ("two.pdf", 1)}
    hits = client.post("/v1/collections/pages/search", json={"query": "librarian"}).json()["hits"]
    assert hits[0]["page"] == 1
