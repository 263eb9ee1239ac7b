"""What a conversation still knows after a truncation (CachedAttention section 3.4, table 1), on
real text.

    python -m benchmarks.truncation --data FOLDER [--quick] [--model smollm2] [--half test]

Half of a history is dropped, and the KV of the rest moves to new positions or, with TT, is computed
again. Text: news of MiniLongBench without a template in turns of 128 tokens, perplexity of turns
past a window of 1,024. Conversations: each turn is a paragraph of an XQuAD article with a question
and its gold answer; after a truncation all questions are asked again, and another one about each
paragraph, without it: mean log likelihood of a gold answer's tokens. All lists start from the same
KV. "attention" is a trial and no setting: half of what it keeps are the last tokens, the other half
those with the most attention of later tokens, over all heads and layers (H2O). FOLDER is that of
`benchmarks.real`.
"""

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import report, sets
from benchmarks.quality_data import read
from benchmarks.real import NO_DATA
from benchmarks.real_sets import half_of
from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.config import SessionConfig
from ragkv.model import full_pass, grown
from ragkv.prompt.history import History, fitted, merged

TT = "oldest, computed again (TT)"
ATTENTION = "attention"
LISTS = {
    "nothing": None,
    "oldest": SessionConfig(),
    "oldest, no sinks": SessionConfig(sink_tokens=0),
    TT: SessionConfig(),
    "keep-dialogue": SessionConfig(discard="keep-dialogue"),
    ATTENTION: SessionConfig(),
}
# tokens
TURN = 128
WINDOW = 1024
TEXT = 1792


@torch.no_grad()
def unattended(engine: Engine, history: Any) -> list[tuple[int, int]]:
    """The half of a history that is not among its last quarter and gets the least attention of
    later tokens.
    """
    model = engine.model.adapter.model
    prefix = engine.parts.intake.runs.before_documents
    model.set_attn_implementation("eager")
    seen = model(torch.tensor([[*prefix, *history.token_ids]]), output_attentions=True).attentions
    weight = sum(layer[0].float().sum((0, 1)) for layer in seen)[len(prefix) :]
    return [
        (at, at + 1)
        for at in weight[: -(len(weight) // 4)]
        .topk(len(weight) // 2, largest=False)
        .indices.tolist()
    ]


def cut(engine: Engine, session: Any, name: str, room: int) -> None:
    """Truncate the session if its history has more than `room` tokens."""
    history = session.state.history
    settings = LISTS[name]
    if settings is None or len(history) <= room:
        return
    if name == ATTENTION:
        history = history.without(merged(unattended(engine, history), len(history)))
    else:
        history, _ = fitted(history, room, settings)
    kept = History((), history.token_ids, history.parts) if name == TT else history
    session.commit(lambda state: replace(state, history=kept))


@torch.no_grad()
def likelihood(
    engine: Engine, session: Any, question: Any, gold: Sequence[int], **options: Any
) -> float:
    """Log likelihood of the tokens `gold` behind a question, a mean, with the session's history
    from the engine.
    """
    prefill = engine.prefill(question, session=session, **options)
    kv = grown(prefill.kv, len(gold))
    adapter = engine.model.adapter
    logits = prefill.logits[None].float()
    if len(gold) > 1:
        rest = adapter.logits(full_pass(adapter, torch.tensor(gold[:-1]), kv, start=kv.length))
        logits = torch.cat((logits, rest.float()))
    return -float(torch.nn.functional.cross_entropy(logits, torch.tensor(gold)))


def texts(engine: Engine, options: argparse.Namespace) -> Iterator[tuple[str, str, float]]:
    """For each list and turn past the window: the log likelihood."""
    contexts = read(options.data / "MiniLongBench_multi_news.json")
    news = [
        chunk for one in contexts if half_of(one.chunks[0]) == options.half for chunk in one.chunks
    ]
    stream = engine.chunk("\n\n".join(news)).token_ids
    for number, start in enumerate(range(0, len(stream) - TEXT, TEXT)[: options.texts]):
        turns = [stream[at : at + TURN] for at in range(start, start + TEXT, TURN)]
        fit = WINDOW // TURN
        base = engine.session(f"text {number}")
        for turn in turns[:fit]:
            engine.append(base, turn, (), raw=True)
        for name in LISTS:
            session = base.fork(f"{name} {number}")
            for turn in turns[fit:]:
                cut(engine, session, name, WINDOW - TURN)
                yield name, "text", likelihood(engine, session, turn[:1], turn[1:], raw=True)
                engine.append(session, turn, (), raw=True)


def conversations(engine: Engine, options: argparse.Namespace) -> Iterator[tuple[str, str, float]]:
    """For each list and question: whether it was asked before, and the log likelihood of its gold
    answer.
    """
    articles = json.loads((options.data / "xquad.en.json").read_text("utf-8"))["data"]
    articles = [
        one
        for at, one in enumerate(articles)
        if half_of(one.get("title") or str(at)) == options.half
    ]
    for number, article in enumerate(articles[: options.conversations]):
        asked = [one for one in article["paragraphs"] if len(one["qas"]) > 1]
        base = engine.session(f"{number}")
        for one in asked:
            first = one["qas"][0]
            engine.append(
                base, first["question"], first["answers"][0]["text"], [one["context"]], reuse="none"
            )
        for name in LISTS:
            session = base.fork(f"{number} {name}")
            cut(engine, session, name, len(session.state.history) - 1)
            for one in asked:
                for what, qa in zip(("asked before", "new"), one["qas"], strict=False):
                    gold = engine.chunk(qa["answers"][0]["text"]).token_ids
                    yield name, what, likelihood(engine, session, qa["question"], gold)


def main() -> None:
    """Measure, print the table, write the JSON."""
    options = _options()
    if options.data is None:
        report.skip(NO_DATA)
    torch.set_num_threads(options.threads)
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    with Engine.from_pretrained(
        options.model, EngineConfig(store=StoreConfig(codec="raw"))
    ) as engine:
        for part in (texts, conversations):
            for name, what, value in part(engine, options):
                found[name, what].append(value)
    mean = {key: statistics.mean(values) for key, values in found.items()}
    rows = [
        (name, math.exp(-mean[name, "text"]), mean[name, "asked before"], mean[name, "new"])
        for name in LISTS
    ]
    print(
        f"{options.model}: {len(found[TT, 'text'])} turns past the window, twice "
        f"{len(found[TT, 'new'])} questions"
    )
    report.table(("dropped", "perplexity", "gold, asked before", "gold, new question"), rows)
    print(
        "written:",
        report.save(
            "truncation", {"rows": rows, "values": {" | ".join(k): v for k, v in found.items()}}
        ),
    )


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, quick="one text, one conversation", threads=1)
    parser.add_argument(
        "--data", type=Path, default=sets.questions(), help="the folder of sets as published"
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--half", default="test", choices=("dev", "test"))
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--conversations", type=int, default=10)
    options = parser.parse_args()
    return argparse.Namespace(
        **vars(options) | ({"texts": 1, "conversations": 1} if options.quick else {})
    )


if __name__ == "__main__":
    main()
