"""Question sets for the quality benchmark: the project's worlds, and common public formats.

One `Context` is a list of chunks with all questions about it, so the chunks are processed once. The content of a file
determines its format: worlds JSONL (`chunks`, `questions`), MuSiQue as in CacheBlend (`ctxs`), LongBench prompts
(`origin_prompt`), or any JSONL with a question, its contexts and its answers per line.
"""

import ast
import json
import random
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Question:
    """One question, the conversation before it, and the correct answers."""

    type: str
    text: str
    golds: tuple[str, ...]
    history: tuple[tuple[str, str], ...] = ()  # earlier turns: question, answer
    guess: float = 0.0  # the chance of guessing a word of the right kind from the context


@dataclass(frozen=True)
class Context:
    """Chunks and the questions about them."""

    chunks: tuple[str, ...]
    questions: tuple[Question, ...]


def read(path: Path, questions: int | None = None) -> list[Context]:
    """The contexts of a file in order, with at most `questions` questions in total."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        contexts = [_line(json.loads(line)) for line in text.splitlines() if line.strip()]
    else:
        loaded = json.loads(text)
        records = list(loaded.values()) if isinstance(loaded, dict) else loaded
        contexts = [_musique(record) if "ctxs" in record else _longbench(record) for record in records]
    return limited([context for context in contexts if context.questions], questions)


def limited(contexts: list[Context], questions: int | None) -> list[Context]:
    """The first contexts, with `questions` questions in total."""
    kept: list[Context] = []
    for context in contexts:
        left = len(context.questions) if questions is None else questions - sum(len(c.questions) for c in kept)
        if left <= 0:
            break
        kept.append(replace(context, questions=context.questions[:left]))
    return kept


def balanced(contexts: list[Context], each: int) -> list[Context]:
    """At most `each` questions of every type, in order of appearance."""
    counts: dict[str, int] = defaultdict(int)
    kept = []
    for context in contexts:
        chosen = []
        for question in context.questions:
            if counts[question.type] < each:
                counts[question.type] += 1
                chosen.append(question)
        if chosen:
            kept.append(replace(context, questions=tuple(chosen)))
    return kept


def worlds(count: int, seed: int, level: int) -> list[Context]:
    """Held-out worlds from the project's own generator; needs the repository, because it has `training`."""
    from training.worlds import level as spec_of
    from training.worlds import record, world

    spec = replace(spec_of(level), questions=30)
    base = 8_000_000_000_000 + seed * 1_000_000  # far from the seeds of training and evaluation
    return [_world(json.loads(json.dumps(record(world(base + number, spec))))) for number in range(count)]


def reordered(context: Context, order: str) -> Context:
    """The same chunks "reversed" or "shuffled"; "told" keeps their order."""
    chunks = list(context.chunks)
    if order == "reversed":
        chunks.reverse()
    elif order == "shuffled":
        random.Random(len(chunks[0])).shuffle(chunks)
    return replace(context, chunks=tuple(chunks))


def _line(record: dict[str, Any]) -> Context:
    if "questions" in record:
        return _world(record)
    return _musique(record) if "ctxs" in record else _plain(record)


def _plain(record: dict[str, Any]) -> Context:
    """`{"question": ..., "contexts": [text or {"title", "text"}], "answers": [...]}`, also with mtRAG's field names."""
    turns = record["input"] if isinstance(record.get("input"), list) else []  # {"speaker", "text"}, the question last
    asked = record["question"] if "question" in record else turns[-1]["text"]
    history = tuple((one["text"], other["text"]) for one, other in zip(turns[:-1:2], turns[1:-1:2], strict=False))
    golds = next(record[name] for name in ("answers", "targets", "answer") if name in record)
    listed = golds if isinstance(golds, list) else [golds]
    texts = tuple(str(gold["text"] if isinstance(gold, dict) else gold) for gold in listed)
    chunks = next(record[name] for name in ("contexts", "documents", "chunks") if name in record)
    titled = ((c.get("title", ""), c["text"]) if isinstance(c, dict) else ("", str(c)) for c in chunks)
    texts_of_chunks = tuple(f"{title}\n{text.strip()}" if title else text.strip() for title, text in titled)
    questions = (Question(str(record.get("type", "all")), asked, texts, history),)
    return Context(texts_of_chunks, questions if texts and chunks else ())


def _world(record: dict[str, Any]) -> Context:
    def question(made: dict[str, Any]) -> Question:
        history = tuple((str(asked), str(answer)) for asked, answer in made.get("history", ()))
        golds = made.get("answers") or [made["answer"]]
        return Question(made.get("type", "all"), made["question"], tuple(golds), history, made.get("guess", 0.0))

    return Context(tuple(record["chunks"]), tuple(map(question, record["questions"])))


def _musique(record: dict[str, Any]) -> Context:
    chunks = tuple(
        f"{ctx['title']}\n{ctx['text']}\n\n" if ctx["title"] else f"{ctx['text']}\n\n" for ctx in record["ctxs"]
    )
    golds = record["answers"]
    golds = [gold for group in golds for gold in (group if isinstance(group, list) else [group])]
    return Context(chunks, (Question("musique", record["question"], tuple(golds)),))


def _longbench(record: dict[str, Any]) -> Context:
    """A whole prompt, split at its passages or dialogues; the text after the last blank line is the question."""
    pieces = [piece for piece in re.split(r"(?=Passage \d+:)|(?=\n\nDialogue:)", record["origin_prompt"]) if piece]
    body, _, tail = pieces[-1].rpartition("\n\n")
    chunks = (*pieces[:-1], body) if body else tuple(pieces[:-1])
    golds = record["gold"]
    golds = ast.literal_eval(golds) if isinstance(golds, str) and golds.startswith("[") else golds
    golds = golds if isinstance(golds, list) else [golds]
    return Context(tuple(chunks), (Question("longbench", tail, tuple(map(str, golds))),))
