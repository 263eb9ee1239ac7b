"""What the CacheBlend paper's benchmark asks: instructions, metric and answer length by data set;
prompts.

Contexts are cut into chunks of at most 512 tokens and a prompt has six of them, as in CacheBlend
section 7: for a question those that a retriever finds, for a summary those at both ends, as
LongBench cuts long contexts in the middle.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.quality_data import Context
from examples.metrics import best, rouge_l, token_f1
from ragkv import Chunk, Engine
from ragkv.errors import InputError
from ragkv.retrieval import Document, Embedder, Index, Splitter

# SPARE_TOKENS of the context stay free: MapReduce asks for summaries with a longer question.
SPARE_TOKENS = 128


@dataclass(frozen=True)
class Task:
    """How the questions of a data set are asked and scored."""

    metric: Callable[[str, str], float]
    metric_name: str
    new_tokens: int  # most tokens of an answer, as in LongBench
    before: str = ""  # the instruction in front of the chunks
    asked: str = "{text}"  # behind the chunks
    retrieved: bool = True  # whether a retriever chooses the chunks
    first_line: bool = False  # only the first line of an answer counts, as in LongBench
    separator: str = "\n\n"  # behind each chunk

    def score(self, answer: str, golds: tuple[str, ...]) -> float:
        """The metric's best value over the gold answers."""
        text = answer.strip()
        return best(self.metric, text.split("\n")[0] if self.first_line else text, golds)


QUESTIONS = Task(
    token_f1,
    "F1",
    32,
    "Read these passages. A question about them follows.\n\n",
    "Answer the question from the passages. Give only the answer, within 5 words.\nQuestion: "
    "{text}\nAnswer:",
)
SUMMARIES = Task(
    rouge_l,
    "Rouge-L",
    512,
    "Read these passages. You will write a summary of them.\n\n",
    "Write a one-page summary of all the passages above.\nSummary:",
    retrieved=False,
)
DIALOGUES = Task(
    rouge_l,
    "Rouge-L",
    128,
    "Summarise a dialogue in a few short sentences. Some examples come first.\n\n",
    retrieved=False,
    first_line=True,
)
# By the name that LongBench gives a set.
TASKS = dict.fromkeys(
    ("2wikimqa", "hotpotqa", "musique", "multifieldqa_en", "narrativeqa", "qasper"), QUESTIONS
)
TASKS |= {"multi_news": SUMMARIES, "samsum": DIALOGUES}


def task_of(contexts: list[Context], source: str) -> Task:
    """The task of a file. Raises `InputError` if it holds other questions than those of the
    published sets.
    """
    kinds = {question.type for context in contexts for question in context.questions}
    unknown = sorted(kinds - TASKS.keys())
    if unknown:
        raise InputError(
            f"{source} has questions of the kind {unknown[0]!r}; known are {', '.join(TASKS)}."
        )
    tasks = {id(TASKS[kind]): TASKS[kind] for kind in kinds}
    if len(tasks) > 1:
        raise InputError(f"{source} mixes {', '.join(sorted(kinds))}: give each its own file.")
    (task,) = tasks.values()
    return task


@dataclass(frozen=True)
class Prepared:
    """A question with the chunks of its prompt."""

    text: str
    golds: tuple[str, ...]
    chunks: tuple[Chunk, ...]  # in the order of the context
    cut: bool  # fewer chunks than wanted, because no more fit the model's context


class Preparer:
    """Cuts contexts and chooses chunks, for one engine and task."""

    def __init__(
        self,
        engine: Engine,
        task: Task,
        count: int,
        chunk_tokens: int,
        embedder: Embedder | None = None,
    ) -> None:
        """A prompt has at most `count` chunks of `chunk_tokens` tokens. Without an `embedder` BM25
        finds them.
        """
        self._engine = engine
        self._task = task
        self._count = count
        self._embedder = embedder
        self._splitter = Splitter(engine.model.count_tokens, chunk_tokens)

    def prepared(self, context: Context) -> Prepared | None:
        """The first question of a context; `None` if not even one chunk fits the model's
        context.
        """
        question = context.questions[0]
        text = self._task.asked.format(text=question.text)
        pieces = self._pieces(context)
        order = self._by_importance(question.text, pieces)
        wanted = order[: self._count]
        fitting = sorted(self._fitting(wanted, pieces, text))
        if not fitting:
            return None
        return Prepared(
            text,
            question.golds,
            tuple(pieces[place] for place in fitting),
            cut=len(fitting) < len(wanted),
        )

    def _pieces(self, context: Context) -> list[Chunk]:
        return [
            self._engine.chunk(passage.text)
            for number, text in enumerate(context.chunks)
            for passage in self._splitter.split(Document(str(number), text))
        ]

    def _by_importance(self, question: str, pieces: list[Chunk]) -> list[int]:
        """All places, the most important first: as retrieved, then from both ends to the middle."""
        found: list[int] = []
        if self._task.retrieved and len(pieces) > self._count:
            with Index(
                None,
                splitter=Splitter(self._engine.model.count_tokens, 10**6),
                embedder=self._embedder,
            ) as index:
                index.writer.ingest(
                    Document(str(place), piece.text) for place, piece in enumerate(pieces)
                )
                hits = index.search(
                    question, self._count, retriever="dense" if self._embedder else "bm25"
                )
            # others may have the same
            texts = [pieces[int(hit.passage.document_id)].text for hit in hits]
            found = [n for text in texts for n, piece in enumerate(pieces) if piece.text == text]
        last = len(pieces) - 1
        ends = [place for step in range(len(pieces)) for place in (step, last - step)]
        return list(dict.fromkeys([*found, *ends]))

    def _fitting(self, wanted: list[int], pieces: list[Chunk], text: str) -> Iterator[int]:
        """The wanted places in turn, until one does not fit."""
        limit = self._engine.model.adapter.context_length
        runs = self._engine.parts.intake.runs
        used = (
            len(runs.before_documents)
            + self._engine.model.count_tokens(text)
            + len(runs.after_question)
        )
        used += self._task.new_tokens + SPARE_TOKENS
        for place in wanted:
            used += len(pieces[place]) + len(self._engine.parts.intake.separator)
            if limit is not None and used > limit:
                return
            yield place
