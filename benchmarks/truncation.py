"""Perplexity past the context window: CachedAttention's table 1, on a trained model and text longer than its window.

    python -m benchmarks.truncation [--quick] [--model ../shared/data/models/stories260K]

Claim: when a conversation overflows the window, dropping the oldest half of its stored KV and rotating the rest to its
new positions (CA) costs at most 2 % of perplexity against computing the kept text again (TT), and a turn after a
truncation computes only its new tokens. The text is sampled from the
model itself, in runs of one window, joined at the token that begins a story; sessions of the engine get it as given
turns. Every token of a turn except its first is scored, with the KV that the engine makes for that turn. OF, the
paper's overflow baseline, computes the truncated text again like TT: the same numbers. Not shown: other models.
"""

import argparse
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks import report
from ragkv import Engine, EngineConfig, FusionConfig
from ragkv.config import SessionConfig
from ragkv.model import full_pass
from ragkv.prompt.history import fitted

METHODS = {"CA": "kv", "TT": "tokens"}


@dataclass
class Tally:
    """The totals of one method over all conversations."""

    nats: float = 0.0  # of scored tokens in turns after a truncation
    scored: int = 0
    nats_before: float = 0.0  # of tokens before the first overflow: the same for all methods
    scored_before: int = 0
    computed: int = 0  # tokens computed by all turns
    computed_cut: int = 0  # tokens computed by turns that truncate
    cut_turns: int = 0
    new_tokens: int = 0
    seconds: float = 0.0

    @property
    def perplexity(self) -> float:
        """Perplexity after a truncation."""
        return math.exp(self.nats / max(1, self.scored))


@torch.no_grad()
def sample(model: Any, tokens: int, batch: int = 64) -> list[int]:
    """About `tokens` tokens of the model's own text, in runs of one window."""
    window = model.config.max_position_embeddings
    out: list[int] = []
    while len(out) < tokens:
        begin = torch.full((batch, 1), model.config.bos_token_id)
        ids = model.generate(
            begin,
            attention_mask=torch.ones_like(begin),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_length=window,
            eos_token_id=None,
            pad_token_id=0,
        )
        out += ids.flatten().tolist()
    return out[:tokens]


@torch.no_grad()
def nats(engine: Engine, session: Any, turn: list[int]) -> float:
    """The negative log likelihood of a turn's tokens, except the first, with the session's history from the engine."""
    prefill = engine.prefill(turn[:1], session=session)
    kv, adapter = prefill.fused.kv, engine.model.adapter
    kv.reserve(kv.length + len(turn))
    rest = torch.tensor(turn[1:-1])
    hidden = full_pass(adapter, rest, kv, start=kv.length)
    logits = torch.cat((prefill.logits[None], adapter.logits(hidden)))
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(turn[1:]), reduction="sum"))


def converse(engine: Engine, text: list[int], turn_tokens: int, name: str, tally: Tally) -> None:
    """Run one conversation of given turns; every turn is scored before it is added."""
    session, began, cut = engine.session(name), time.perf_counter(), False
    room = engine.model.adapter.context_length - len(engine.intake.runs.before_documents) - turn_tokens
    for at in range(0, len(text) - turn_tokens + 1, turn_tokens):
        turn = text[at : at + turn_tokens]
        kept, _ = fitted(session.state.history, room, engine.config.session)
        if session._replace(kept):  # so many tokens were dropped
            tally.cut_turns, cut = tally.cut_turns + 1, True
            tally.computed_cut += engine.prefill(turn, session=session).reuse.computed
        loss = nats(engine, session, turn)
        computed = engine.append(session, turn, ()).reuse.computed
        tally.computed += computed
        tally.new_tokens += turn_tokens
        if cut:
            tally.nats, tally.scored = tally.nats + loss, tally.scored + turn_tokens - 1
        else:
            tally.nats_before, tally.scored_before = tally.nats_before + loss, tally.scored_before + turn_tokens - 1
    session.delete()
    tally.seconds += time.perf_counter() - began


def main() -> None:
    """Sample text, run the conversations, print the table."""
    options = _options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    text = sample(model, options.tokens)
    tallies = {}
    for method, truncation in METHODS.items():
        settings = SessionConfig(truncation=truncation, truncation_ratio=options.ratio, sink_tokens=options.sinks)
        config = EngineConfig(fusion=FusionConfig(sensitivity_prefixes=0, selector="first-k"), session=settings)
        tallies[method] = Tally()
        with Engine(model, config=config) as engine:
            for number, at in enumerate(range(0, len(text), options.conversation)):
                part = text[at : at + options.conversation]
                converse(engine, part, options.turn, f"{method}-{number}", tallies[method])
    base = tallies["TT"].perplexity
    window = model.config.max_position_embeddings
    how = f"turns of {options.turn}, truncation ratio {options.ratio}, sinks {options.sinks}, float32"
    print(f"{Path(options.model).name}, window {window}, {len(text):,} tokens sampled from it,")
    print(f"conversations of {options.conversation}, {how}")
    rows = [
        (
            method,
            tally.perplexity,
            f"{tally.perplexity / base - 1:+.2%}",
            f"{tally.scored:,}",
            math.exp(tally.nats_before / max(1, tally.scored_before)),
            tally.computed_cut / max(1, tally.cut_turns),
            tally.computed / max(1, tally.new_tokens),
        )
        for method, tally in tallies.items()
    ]
    columns = ("PPL past the window", "against TT", "tokens", "PPL before")
    report.table(("method", *columns, "computed a truncating turn", "computed a new token"), rows)
    results = {name: {**asdict(tally), "perplexity": tally.perplexity} for name, tally in tallies.items()}
    print("written:", report.save("truncation", {"options": vars(options), "methods": results}))


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, quick="8,192 tokens", threads=1)
    parser.add_argument("--model", default="../shared/data/models/stories260K", help="a model folder or hub id")
    parser.add_argument("--tokens", type=int, default=114_688)
    parser.add_argument("--conversation", type=int, default=2048, help="tokens of a conversation")
    parser.add_argument("--turn", type=int, default=128, help="tokens of a turn")
    parser.add_argument("--ratio", type=float, default=0.5)
    parser.add_argument("--sinks", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.quick:
        options.tokens = 8192
    return options


if __name__ == "__main__":
    main()
