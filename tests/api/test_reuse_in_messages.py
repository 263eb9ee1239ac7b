"""Passages of the caller's collections are found inside plain messages, in any template."""

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from ragkv import Engine
from ragkv.api.settings import LimitsConfig
from ragkv.chat.catalogue import forms_file
from ragkv.control import Why
from ragkv.retrieval import Document
from tests.chat.prompt_templates import TEMPLATES, passages

from .helpers import app_on, client_of, engine_of, filled, service_of, wait_until
from .test_chat import chat, said

# the others change a passage's own characters
WORD_FOR_WORD = ("plain", "numbered", "titled", "XML", "reordered")
ASK = "\n\nQuestion: who was the keeper?"


@pytest.fixture(scope="module")
def loaded(talker: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A client whose collection holds all passages."""
    home = tmp_path_factory.mktemp("loaded")
    with client_of(app_on(talker, home, model=str(home / "talker"))) as client:
        filled(client, "facts", passages())
        yield client


def reused(got: Any) -> float:
    reuse = got["ragkv"]["reuse"]
    return float((reuse["exact"] + reuse["fused"] + reuse["recomputed"]) / reuse["tokens"])


def chunks(got: Any) -> int:
    """The number of chunks. A stored one that leads has two spans: computed, then fused."""
    spans = [span for span in got["ragkv"]["prompt"] if span["kind"] == "chunk"]
    return sum(span["why"] != Why.LEADING for span in spans)


@pytest.mark.parametrize("role", ["user", "system"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_passages_in_any_template_are_reused_from_the_second_request_on(
    loaded: TestClient, template: str, role: str
) -> None:
    """The shares on the first and second request; answers at ratio 1 are those of a full
    recompute.
    """
    talk = loaded
    shares = {"first": list[float](), "second": list[float]()}
    for seed in range(2):
        chosen = random.Random(f"{template} {role} {seed}").sample(passages(), 6)
        text = TEMPLATES[template](chosen)
        messages: list[Any] = [{"role": "user", "content": text + ASK}]
        if role == "system":
            messages = [
                {"role": "system", "content": "Answer from: " + text},
                {"role": "user", "content": ASK},
            ]
        for call in ("first", "second"):
            got = chat(talk, messages, max_tokens=1)
            shares[call].append(reused(got))
            assert chunks(got) == 6, "each passage is found once, and nothing else is taken for one"
            engine_of(talk.app).flush()
        exact = chat(talk, messages, max_tokens=8, ragkv={"ratio": 1})
        assert said(exact) == said(chat(talk, messages, max_tokens=8, ragkv={"reuse": "none"}))
    print(
        template, role, {call: round(sum(found) / len(found), 2) for call, found in shares.items()}
    )
    assert min(shares["second"]) > 0.7
    if template in WORD_FOR_WORD:
        assert shares["first"] == shares["second"], (
            "the stored chunk is used, whatever stands around it"
        )


def test_a_deleted_passage_is_not_found_and_the_kv_of_its_forms_is_deleted(
    talk: TestClient,
) -> None:
    known = passages()[:2]
    filled(talk, "facts", known)
    messages = [{"role": "user", "content": TEMPLATES["JSON"](known) + ASK}]
    chat(talk, messages, max_tokens=1)
    engine = engine_of(talk.app)
    engine.flush()
    assert chat(talk, messages, max_tokens=1)["ragkv"]["reuse"]["missed_chunks"] == 0
    forms = Path(str(engine.config.store.directory)) / forms_file(engine)
    assert len(forms.read_text().splitlines()) == 2 and forms.stat().st_mode & 0o077 == 0
    stored = engine.stats().store.tiers[-1].entries
    assert talk.delete("/v1/collections/facts/documents/0").status_code == 200
    assert engine.stats().store.tiers[-1].entries < stored - 2
    assert forms.read_text() == ""
    assert chunks(chat(talk, messages, max_tokens=1)) == 1


def test_forms_are_remembered_over_a_restart(talker: Engine, tmp_path: Path) -> None:
    known = passages()[:2]
    messages = [{"role": "user", "content": TEMPLATES["JSON"](known) + ASK}]
    with client_of(app_on(talker, tmp_path, model=str(tmp_path / "talker"))) as client:
        filled(client, "facts", known)
        chat(client, messages, max_tokens=1)
        engine_of(client.app).flush()
    with client_of(app_on(talker, tmp_path, model=str(tmp_path / "talker"))) as client:
        assert chat(client, messages, max_tokens=1)["ragkv"]["reuse"]["missed_chunks"] == 0
        engine = engine_of(client.app)
        assert client.delete("/v1/collections/facts").status_code == 200
        engine.flush()
        assert engine.stats().store.tiers[-1].entries == 0


def test_passages_beyond_the_limit_are_not_looked_for_and_the_notes_say_so(
    talker: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragkv.api.documents.known_passages.BATCH", 1)
    limits = LimitsConfig(known_chars=200)
    with client_of(
        app_on(talker, tmp_path, model=str(tmp_path / "talker"), limits=limits)
    ) as client:
        known = passages()[:5]
        filled(client, "facts", known)
        got = chat(client, [{"role": "user", "content": "\n\n".join(known) + ASK}], max_tokens=1)
    assert chunks(got) == 2
    assert got["ragkv"]["notes"] == [
        "Not looked for in messages: 3 passages; limits.known_chars is 200"
    ]


def test_passages_beyond_the_limit_are_looked_for_once_others_have_made_room(
    talker: Engine, tmp_path: Path
) -> None:
    limits = LimitsConfig(known_chars=200)
    with client_of(
        app_on(talker, tmp_path, model=str(tmp_path / "talker"), limits=limits)
    ) as client:
        filled(client, "large", passages()[:5])
        filled(client, "small", passages()[5:6])
        messages = [{"role": "user", "content": passages()[5] + ASK}]
        before = chat(client, messages, max_tokens=1)
        client.delete("/v1/collections/large").raise_for_status()
        after = chat(client, messages, max_tokens=1)
    note = "Not looked for in messages: 1 passage; limits.known_chars is 200"
    assert (chunks(before), note in before["ragkv"]["notes"]) == (0, True)
    assert (chunks(after), after["ragkv"]["notes"]) == (1, [])


def test_a_passage_that_another_process_stored_is_known_without_a_request(
    talk: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragkv.api.documents.deletions.POLL_S", 0.05)
    filled(talk, "facts", passages()[:1])
    tenant = service_of(talk.app).tenants.opened()[""]
    before = tenant.chat.catalogue.passages.chars
    with tenant.collections.use("facts") as rag:
        rag.index.writer.ingest(
            [Document("other", passages()[1])]
        )  # past the collections' own methods
    wait_until(lambda: tenant.chat.catalogue.passages.chars > before)
    messages = [{"role": "user", "content": passages()[1] + ASK}]
    assert chunks(chat(talk, messages, max_tokens=1)) == 1


def test_a_long_prompt_without_a_passage_of_a_collection_is_logged_once(
    talk: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings(text: str) -> int:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "ragkv.chat"):
            chat(talk, [{"role": "user", "content": text}], max_tokens=1)
        return sum("none of the known texts" in record.getMessage() for record in caplog.records)

    other = "Nothing of this is in a collection. " * 60
    assert warnings(other) == 0, "no corpus is known"
    filled(talk, "facts", passages()[:3])
    assert warnings("Who?") == 0, "a short prompt holds no documents"
    assert warnings(passages()[0] + other) == 0
    assert warnings(other) == 1 and warnings(other) == 0
