"""Question sets for the quality benchmarks, in common public formats.

One `Context` is a list of chunks with all questions about it, so the chunks are processed once. The
fields of a record determine its format: chunks with many questions (`questions`), LongBench as
published (`context`, `answers`), MuSiQue (`paragraphs`), HotpotQA and 2WikiMultihopQA (`context`,
`answer`), MuSiQue as in CacheBlend (`ctxs`), LongBench prompts (`origin_prompt`), or any record
with a question, its contexts and its answers. A file is a JSON list, or has a record in each line
(`.jsonl`).
"""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ragkv.errors import InputError

# LONGBENCH_SPLITS says where a context of these sets is cut; the other sets number their passages.
LONGBENCH_SPLITS = {"samsum": r"(?=^Dialogue:)"}
LONGBENCH_PASSAGES = r"^Passage \d+:\n"
# LONGBENCH_PROMPTS say where the context and the question of a whole prompt stand.
LONGBENCH_PROMPTS = {
    "2wikimqa": r"Answer the question .*?given passages\.\n(Passage 1:.*)\n\nAnswer "
    r".*?\n\nQuestion: (.*)\nAnswer:\s*",
    "samsum": r"Summarize the dialogue .*?examples\.\s*(Dialogue:.*)\n\n(Dialogue: .*)",
    "multi_news": r"You are given several news .*?News:\n(Passage 1:.*)\n\n\nNow, write a "
    r"one-page summary[^\n]*(.*)",
}


@dataclass(frozen=True)
class Question:
    """One question, the conversation before it, and the correct answers."""

    type: str
    text: str
    golds: tuple[str, ...]
    history: tuple[tuple[str, str], ...] = ()  # earlier turns: question, answer


@dataclass(frozen=True)
class Context:
    """Chunks and the questions about them."""

    chunks: tuple[str, ...]
    questions: tuple[Question, ...]


def read(path: Path, questions: int | None = None) -> list[Context]:
    """The contexts of a file in order, with at most `questions` questions in total.

    Raises `InputError`, which names the file, the line or record, and the field.
    """
    found = []
    for place, record in _records(path):
        try:
            found.append(_context(record))
        except InputError as error:
            raise InputError(f"{path}, {place}: {error}") from error
        except KeyError as error:
            raise InputError(f"{path}, {place}: the field {error} is missing.") from error
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise InputError(f"{path}, {place}: the record cannot be read ({error}).") from error
    if not any(context.questions for context in found):
        raise InputError(f"{path} has no question with an answer.")
    return limited([context for context in found if context.questions], questions)


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error}.") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not text.strip():
        raise InputError(f"{path} is empty.")
    if path.suffix == ".jsonl":
        lines = enumerate(text.split("\n"), 1)
        yield from (
            (f"line {number}", _json(line, path, number)) for number, line in lines if line.strip()
        )
        return
    loaded = _json(text, path, 1)
    records = list(loaded.values()) if isinstance(loaded, dict) else loaded
    if not isinstance(records, list):
        raise InputError(
            f"{path} must hold a list of records; JSON lines belong in a file named *.jsonl."
        )
    yield from ((f"record {number}", record) for number, record in enumerate(records, 1))


def _json(text: str, path: Path, line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        hint = "; JSON lines belong in a file named *.jsonl" if error.msg == "Extra data" else ""
        place = f"line {line + error.lineno - 1}, column {error.colno}"
        raise InputError(f"{path}, {place}: this is not JSON ({error.msg}){hint}.") from error


def _context(record: Any) -> Context:
    if not isinstance(record, dict):
        raise InputError(f"a record must be an object with fields, not {_kind(record)}.")
    if "questions" in record:
        return _with_questions(record)
    if "ctxs" in record:
        return _musique_of_cacheblend(record)
    if "origin_prompt" in record:
        return _longbench_prompt(record)
    if "paragraphs" in record:
        return _musique(record)
    if isinstance(record.get("context"), str):
        return _longbench(record)
    return _hotpotqa(record) if "context" in record else _plain(record)


def _field(record: dict[str, Any], name: str, kind: type) -> Any:
    """A field that must be there. Raises `InputError`."""
    if name not in record:
        raise InputError(f"the field {name!r} is missing.")
    if not isinstance(record[name], kind):
        raise InputError(f"the field {name!r} must be {_KINDS[kind]}, not {_kind(record[name])}.")
    return record[name]


_KINDS: dict[type, str] = {str: "a string", list: "a list", dict: "an object"}


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "null" if value is None else f"{value!r:.40}")


def _strings(values: list[Any], name: str) -> tuple[str, ...]:
    for value in values:
        if not isinstance(value, str):
            raise InputError(f"the field {name!r} must hold strings only, not {_kind(value)}.")
    return tuple(values)


def limited(contexts: list[Context], questions: int | None) -> list[Context]:
    """The first contexts, with `questions` questions in total."""
    kept: list[Context] = []
    for context in contexts:
        left = (
            len(context.questions)
            if questions is None
            else questions - sum(len(c.questions) for c in kept)
        )
        if left <= 0:
            break
        kept.append(replace(context, questions=context.questions[:left]))
    return kept


def _plain(record: dict[str, Any]) -> Context:
    """`{"question": ..., "contexts": [text or {"title", "text"}], "answers": [...]}`, also with
    mtRAG's field names.
    """
    # {"speaker", "text"}, the question last
    turns = record["input"] if isinstance(record.get("input"), list) else []
    asked = (
        turns[-1]["text"] if turns and "question" not in record else _field(record, "question", str)
    )
    history = tuple(
        (one["text"], other["text"])
        for one, other in zip(turns[:-1:2], turns[1:-1:2], strict=False)
    )
    golds = _first(record, "answers", "targets", "answer")
    listed = golds if isinstance(golds, list) else [golds]
    texts = tuple(str(gold["text"] if isinstance(gold, dict) else gold) for gold in listed)
    chunks = _first(record, "contexts", "documents", "chunks")
    titled = (
        (c.get("title", ""), c["text"]) if isinstance(c, dict) else ("", str(c)) for c in chunks
    )
    texts_of_chunks = tuple(
        f"{title}\n{text.strip()}" if title else text.strip() for title, text in titled
    )
    questions = (Question(str(record.get("type", "all")), asked, texts, history),)
    return Context(texts_of_chunks, questions if texts and chunks else ())


def _first(record: dict[str, Any], *names: str) -> Any:
    for name in names:
        if name in record:
            return record[name]
    raise InputError(f"it has none of the fields {', '.join(map(repr, names))}.")


def _with_questions(record: dict[str, Any]) -> Context:
    def question(made: dict[str, Any]) -> Question:
        history = tuple((str(asked), str(answer)) for asked, answer in made.get("history", ()))
        golds = made.get("answers") or [made["answer"]]
        return Question(made.get("type", "all"), made["question"], tuple(golds), history)

    return Context(tuple(record["chunks"]), tuple(map(question, record["questions"])))


def _musique_of_cacheblend(record: dict[str, Any]) -> Context:
    chunks = tuple(
        f"{ctx['title']}\n{ctx['text']}\n\n" if ctx["title"] else f"{ctx['text']}\n\n"
        for ctx in record["ctxs"]
    )
    golds = record["answers"]
    golds = [gold for group in golds for gold in (group if isinstance(group, list) else [group])]
    return Context(chunks, (Question("musique", record["question"], tuple(golds)),))


def _musique(record: dict[str, Any]) -> Context:
    """As published. Questions that the paragraphs do not answer (MuSiQue-Full has them) are left
    out.
    """
    paragraphs = []
    for number, paragraph in enumerate(_field(record, "paragraphs", list)):
        if not isinstance(paragraph, dict):
            raise InputError(f"'paragraphs' must hold objects, not {_kind(paragraph)}.")
        try:
            paragraphs.append(
                _titled(_field(paragraph, "title", str), _field(paragraph, "paragraph_text", str))
            )
        except InputError as error:
            raise InputError(f"in paragraph {number}, {error}") from error
    asked = _field(record, "question", str)
    answer = _field(record, "answer", str)
    golds = (answer, *_strings(record.get("answer_aliases") or [], "answer_aliases"))
    return Context(
        tuple(paragraphs),
        (Question("musique", asked, golds),) if record.get("answerable", True) else (),
    )


def _hotpotqa(record: dict[str, Any]) -> Context:
    """HotpotQA and 2WikiMultihopQA as published, or with the columns of the Hugging Face hub."""
    listed = record["context"]
    if isinstance(listed, dict):
        listed = list(
            zip(_field(listed, "title", list), _field(listed, "sentences", list), strict=True)
        )
    paragraphs = []
    for number, pair in enumerate(_field({"context": listed}, "context", list)):
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2
        if not (is_pair and isinstance(pair[0], str) and isinstance(pair[1], list)):
            raise InputError(
                f"'context' must hold pairs of a title and its sentences; entry {number} is none."
            )
        paragraphs.append(_titled(pair[0], "".join(_strings(pair[1], "context"))))
    name = "2wikimqa" if "evidences" in record else "hotpotqa"
    question = Question(name, _field(record, "question", str), (_field(record, "answer", str),))
    return Context(tuple(paragraphs), (question,))


def _titled(title: str, text: str) -> str:
    return f"{title}\n{text.strip()}" if title else text.strip()


def _longbench(record: dict[str, Any]) -> Context:
    """A record as published: the context is cut at its passages or examples."""
    name = _field(record, "dataset", str).removesuffix("_e")
    pieces = re.split(
        LONGBENCH_SPLITS.get(name, LONGBENCH_PASSAGES), _field(record, "context", str), flags=re.M
    )
    golds = _strings(_field(record, "answers", list), "answers")
    question = Question(name, _field(record, "input", str).strip(), golds)
    return Context(
        tuple(piece.strip() for piece in pieces if piece.strip()), (question,) if golds else ()
    )


def _longbench_prompt(record: dict[str, Any]) -> Context:
    """A whole prompt of LongBench, which is taken apart again."""
    golds = record["gold"]
    golds = ast.literal_eval(golds) if isinstance(golds, str) and golds.startswith("[") else golds
    answers = list(map(str, golds if isinstance(golds, list) else [golds]))
    for name, form in LONGBENCH_PROMPTS.items():
        if found := re.fullmatch(form, record["origin_prompt"], re.S):
            context, asked = found.groups()
            return _longbench(
                {"dataset": name, "context": context, "input": asked, "answers": answers}
            )
    raise InputError(f"its prompt has none of the forms of {', '.join(LONGBENCH_PROMPTS)}.")
