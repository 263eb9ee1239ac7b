"""How much slower a token is with a JSON schema than without, alone and in a batch; and what a mask costs.

    python -m benchmarks.structured [--quick] [--libraries]

Claim: with a schema a token takes at most 1.25 times as long. The bundled reader is the hardest case: its decoding step
is the shortest of all models, and a mask costs the same for each. Each pair of runs decodes as many tokens, with and
without a schema, in turns; the ratio is of the medians. `--libraries` times compiling and masks of llguidance, and of
xgrammar where it is installed, for the reader's tokenizer and for one of 151,936 byte-level tokens of random letters.
"""

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.report import parser, save, table
from ragkv import Engine
from ragkv.prompt.constraints import ConstraintTokenizer, Grammars, ResponseFormat

QUESTION = "Who are the people of the town, and what is the job of each?"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "job": {"enum": ["miller", "potter", "dancer", "librarian"]},
    },
    "required": ["name", "age", "job"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 100}  # never complete within a run
LARGE = 151_936


def main() -> None:
    """Measure and print."""
    options = parser(__doc__, quick="fewer runs, shorter answers")
    options.add_argument("--libraries", action="store_true", help="time compiling and masks instead of decoding")
    given = options.parse_args()
    rows = (
        libraries() if given.libraries else decoding(runs=5 if given.quick else 15, tokens=64 if given.quick else 128)
    )
    cells = [[f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row.values()] for row in rows]
    table(list(rows[0]), cells)
    print("written:", save("structured-libraries" if given.libraries else "structured", {"rows": rows}))


def decoding(runs: int, tokens: int) -> list[dict[str, Any]]:
    """Milliseconds a token, without and with a schema, for 1, 4 and 8 answers at once; mixed: half of them with one."""
    form = ResponseFormat.json_schema(SCHEMA)
    rows = []
    with Engine.from_pretrained("reader") as engine:

        def run(forms: list[ResponseFormat | None]) -> float:
            with ThreadPoolExecutor(len(forms)) as pool:
                list(pool.map(lambda one: _decode(engine, one, 2), forms))  # warm
                began = time.perf_counter()
                list(pool.map(lambda one: _decode(engine, one, tokens), forms))
            return (time.perf_counter() - began) * 1e3 / tokens

        for answers in (1, 4, 8):
            plain, constrained, mixed = [], [], []
            for _ in range(runs):
                plain.append(run([None] * answers))
                constrained.append(run([form] * answers))
                mixed.append(run([None, form] * (answers // 2))) if answers > 1 else None
            without, with_schema = statistics.median(plain), statistics.median(constrained)
            row = {"answers": answers, "plain_ms": without, "schema_ms": with_schema, "ratio": with_schema / without}
            rows.append(row | {"mixed_ratio": statistics.median(mixed) / without if mixed else None})
    return rows


def _decode(engine: Engine, form: ResponseFormat | None, tokens: int) -> None:
    answer = engine.answer(QUESTION, response_format=form, max_new_tokens=tokens, min_new_tokens=tokens)
    assert len(answer.token_ids) == tokens


def libraries() -> list[dict[str, Any]]:
    """Milliseconds to build the tokenizer and to compile the schema; microseconds for a mask and its token."""
    with Engine.from_pretrained("reader") as engine:
        tokenizers = {"reader": (engine.tokenizer, engine.parts.adapter.vocabulary), "large": (_large(), LARGE)}
    rows = []
    for name, (tokenizer, vocabulary) in tokenizers.items():
        for library, started in (("llguidance", _llguidance), ("xgrammar", _xgrammar)):
            try:
                build_ms, compile_ms, steps = started(tokenizer, vocabulary)
            except ImportError:
                continue
            times = sorted(steps)
            row: dict[str, Any] = {
                "library": library,
                "tokenizer": name,
                "build_ms": build_ms,
                "compile_ms": compile_ms,
            }
            rows.append(row | {"median_us": statistics.median(times), "p99_us": times[int(0.99 * len(times))]})
    return rows


def _llguidance(tokenizer: Any, vocabulary: int) -> tuple[float, float, list[float]]:
    source = ConstraintTokenizer(tokenizer, vocabulary, ())
    build_ms = _ms(source.get)
    grammars = Grammars(source)
    compile_ms = _ms(lambda: grammars.compile(ResponseFormat.json_schema(SCHEMA)))
    constraint, logits = grammars.compile(ResponseFormat.json_schema(SCHEMA)).start(), torch.randn(vocabulary)
    return build_ms, compile_ms, list(_steps(lambda: constraint.mask(logits), constraint.accept))


def _xgrammar(tokenizer: Any, vocabulary: int) -> tuple[float, float, list[float]]:
    import xgrammar

    made: list[Any] = []
    build_ms = _ms(
        lambda: made.append(
            xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary))
        )
    )
    compile_ms = _ms(lambda: made.append(made[0].compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)))
    matcher, bits = xgrammar.GrammarMatcher(made[1]), xgrammar.allocate_token_bitmask(1, vocabulary)
    logits = torch.randn(1, vocabulary)

    def mask() -> torch.Tensor:
        masked = logits.clone()
        matcher.fill_next_token_bitmask(bits)
        xgrammar.apply_token_bitmask_inplace(masked, bits)
        return masked[0]

    return build_ms, compile_ms, list(_steps(mask, matcher.accept_token))


def _steps(mask: Callable[[], torch.Tensor], accept: Callable[[int], Any]) -> Iterator[float]:
    """Microseconds for each of 300 masks with the token that is chosen at random from it."""
    random.seed(0)
    for _ in range(300):
        began = time.perf_counter()
        masked = mask()
        took = time.perf_counter() - began
        token = random.choice(masked.isfinite().nonzero().flatten().tolist())
        began = time.perf_counter()
        accept(token)
        yield (took + time.perf_counter() - began) * 1e6


def _ms(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def _large() -> Any:
    """A byte-level tokenizer with `LARGE` tokens: all bytes, then random words."""
    random.seed(1)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = dict.fromkeys(["</s>", *alphabet])
    while len(words) < LARGE:
        words[
            random.choice(["Ġ", ""]) + "".join(random.choices('etaoinshrdlucm,.:"{}0123', k=random.randint(2, 8)))
        ] = None
    backend = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


if __name__ == "__main__":
    main()
