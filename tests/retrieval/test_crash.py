"""After a kill at any moment, the index is in the old or the new state, never in a mix."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = 25

# The parent imports once, then forks: one child rewrites the corpus until it is killed, then
# another child checks it.
SCRIPT = """if True:
    import json, os, random, signal, sys, time
    from pathlib import Path
    import langchain_text_splitters  # imported before the fork, so that children start at once
    from ragkv.retrieval import Document, Index
    from tests.retrieval.fakes import HashEmbedder, word_splitter

    directory, kills = sys.argv[1], int(sys.argv[2])
    FILES = 30

    def corpus(version):
        return [Document(str(i), f"version{version} of document{i}\\n\\nshared{i} words") for i in range(FILES)]

    def open_index():
        return Index(directory, splitter=word_splitter(3), embedder=HashEmbedder())

    def write(start):
        with open_index() as index:
            for version in range(start, start + 10_000):
                index.writer.ingest(corpus(version))
                index.search("shared1 words", retriever="bm25")

    def check(expected_documents):
        with open_index() as index:
            stats = index.contents.stats()
            texts = [p.text for p in index.contents.passages()]
            versions = {t.split()[0] for t in texts if t.startswith("version")}
            assert stats.documents in expected_documents, stats
            assert len(versions) == min(1, stats.documents), versions
            assert len(texts) == stats.passages == stats.texts == stats.embedded_texts == 2 * stats.documents, stats
            for i in range(stats.documents):
                document = index.contents.document(str(i))
                found = [document.text[slice(*p.span)] for p in index.contents.passages(str(i))]
                assert found == document.text.split("\\n\\n")
            if versions:
                (version,) = versions
                hits = index.search(f"{version} of document7", retriever="bm25", k=1)
                assert hits[0].passage.text == f"{version} of document7", hits
                assert index.search("shared9 words", k=1, retriever="bm25")[0].passage.document_id == "9"
                return int(version.removeprefix("version"))
        return -1

    def in_child(work):
        reading, writing = os.pipe()
        child = os.fork()
        if child:
            os.close(writing)
            return child, os.fdopen(reading)
        os.close(reading)
        status = 1
        try:
            os.write(writing, str(work()).encode())
            status = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        os._exit(status)

    random.seed(11)
    versions, last = [], -1
    for kill in range(kills):
        child, _ = in_child(lambda: write(last + 1))
        time.sleep(random.uniform(0.02, 0.35))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        child, answer = in_child(lambda: check((0, FILES) if last < 0 else (FILES,)))
        _, status = os.waitpid(child, 0)
        assert status == 0, f"damaged after kill {kill}"
        found = int(answer.read())
        assert found >= last, (found, last)  # committed documents are never lost
        last = found
        versions.append(last)
    print(json.dumps(versions))
"""


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="needs fork")
def test_after_a_kill_at_any_moment_the_index_is_whole(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "index"), str(KILLS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    versions = json.loads(done.stdout)
    assert len(versions) == KILLS
    assert versions[-1] > 0  # the killed children did commit something
