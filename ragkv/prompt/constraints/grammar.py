"""Compiled forms, and the constraint of one answer.

A grammar is compiled by llguidance, whose own limits bound the work of a token's mask. `trial.py`
bounds the time and the memory of compiling: each form is first compiled in a process that can be
ended. Compiling and slow masks take turns, which are shared fairly between tenants. So slow forms
from strangers occupy one processor at most.
"""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import IO, Any

import numpy as np
import torch

from ragkv.config import MIB
from ragkv.errors import DeadlineError, InputError, MissingExtraError, SchemaError
from ragkv.runtime import ByteCache, Check, FairLock, begun, no_check
from ragkv.runtime.waiting import POLL_S

from . import trial
from .response_format import CallFormat, ResponseFormat

KEPT_BYTES = 64 * MIB  # of compiled grammars that an engine keeps
COMPILE_S = 1.0  # processor time of compiling a grammar, at most
COMPILE_BYTES = 64 * MIB  # memory of compiling a grammar, at most
WAIT_S = 30.0  # that a busy machine may need for that
# After a mask that took longer than `SLOW_S`, an answer's next one waits for its turn.
SLOW_S = 0.01
_SAMPLE_TEXT = '{"a": [1, -2.5, true], "b c": {"d": "é \\" 漢"}}'


class ConstraintTokenizer:
    """One model's tokenizer as the compiler of grammars sees it.

    It is built at the first constrained answer, and shared by all engines on the model.
    """

    def __init__(self, tokenizer: Any | None, vocabulary: int, end_tokens: Sequence[int]) -> None:
        """`vocabulary` is V, the width of the logits. Nothing is built yet."""
        self._tokenizer = tokenizer
        self.vocabulary = vocabulary
        self._lock = threading.Lock()
        self.lock = FairLock()
        self._built: Any = None
        own_end = getattr(tokenizer, "eos_token_id", None)
        self.end_tokens = tuple(end_tokens) or (() if own_end is None else (int(own_end),))

    def get(self) -> Any:
        """The compiler's tokenizer. Raises `MissingExtraError`, and `InputError` for a tokenizer it
        cannot use.
        """
        with self._lock:
            if self._built is None:
                self._built = self._build()
            return self._built

    def _build(self) -> Any:
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise MissingExtraError("llguidance", "structured", "Structured output") from error
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise InputError(
                "Structured output needs a fast tokenizer (tokenizers library), and this engine "
                "has none."
            )
        if not self.end_tokens:
            raise InputError(
                "Structured output needs an end token, and neither the model nor its tokenizer "
                "names one."
            )
        try:
            built = LLTokenizer(
                _without_added_space(backend.to_str()),
                n_vocab=self.vocabulary,
                eos_token=list(self.end_tokens),
            )
        except (ValueError, RuntimeError) as error:
            raise InputError(
                f"Structured output does not support this tokenizer: {error}."
            ) from error
        self._check(built)
        return built

    def _check(self, built: Any) -> None:
        """Raise `InputError` if the compiler and the tokenizer disagree about the bytes of
        tokens.
        """
        ids = self._tokenizer(_SAMPLE_TEXT, add_special_tokens=False)["input_ids"]  # type: ignore[misc]
        decoded = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)  # type: ignore[union-attr]
        if built.decode_bytes(list(ids)).decode("utf-8", "replace").strip() != decoded.strip():
            raise InputError(
                "Structured output does not support this tokenizer: the bytes of its tokens are "
                "unknown."
            )


class TokenConstraint:
    """What one answer may contain. One thread at a time; dies with the answer."""

    def __init__(self, matcher: Any, tokenizer: ConstraintTokenizer, tenant: str = "") -> None:
        self._matcher = matcher
        self._tenant = tenant
        self._vocabulary = tokenizer.vocabulary
        self.end_tokens = tokenizer.end_tokens
        self._lock = tokenizer.lock
        self._took_s = 0.0  # of the last mask
        self._packed: bytes | None = None  # the next mask: a bit for each token

    def prepare(self) -> None:
        """Compute the next mask now, while a step runs. Raises nothing: `mask` does."""
        if self._packed is None and not self.finished:
            with self._lock.hold(self._tenant) if self._took_s > SLOW_S else nullcontext():
                began = time.perf_counter()
                self._packed = self._matcher.compute_bitmask()
                self._took_s = time.perf_counter() - began

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        """A copy of `logits` (V,) in which every token that is not allowed here is minus infinity.

        Raises `InputError` if the form needs more work for one token than the limits allow.
        """
        self.prepare()
        self._check()
        assert self._packed is not None  # nothing is chosen behind a finished answer
        bits = np.unpackbits(
            np.frombuffer(self._packed, np.uint8), count=self._vocabulary, bitorder="little"
        )
        forbidden = torch.from_numpy(bits == 0)
        return logits.masked_fill(forbidden.to(logits.device, non_blocking=True), -torch.inf)

    def accept(self, token: int) -> None:
        """Go on behind `token`, which the mask allowed."""
        self._packed = None
        self._matcher.consume_token(token)
        self._check()

    @property
    def finished(self) -> bool:
        """Whether the answer is complete and nothing can follow."""
        return bool(self._matcher.is_stopped())

    @property
    def complete(self) -> bool:
        """Whether the answer so far has the form, though more may follow."""
        return bool(self._matcher.is_accepting() or self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InputError(
                "The response format is too complex to go on: "
                f"{_first_line(self._matcher.get_error())}."
            )


class Grammar:
    """A compiled form. Immutable: each answer works on a copy."""

    def __init__(self, matcher: Any, tokenizer: ConstraintTokenizer) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._lock = threading.Lock()

    def start(self, tenant: str = "") -> TokenConstraint:
        """The constraint of a new answer, whose slow masks wait for `tenant`'s turn."""
        with self._lock:
            return TokenConstraint(self._matcher.deep_copy(), self._tokenizer, tenant)


class Grammars:
    """Compiles forms, and keeps those that were used last."""

    def __init__(self, tokenizer: ConstraintTokenizer) -> None:
        self._tokenizer = tokenizer
        self.kept: ByteCache[ResponseFormat, Grammar] = ByteCache(KEPT_BYTES)

    def load(self) -> None:
        """Build what the first form needs, if it can be built: that holds the interpreter's lock
        for half a second.
        """
        with suppress(MissingExtraError, InputError):  # the first constrained answer says so
            self._tokenizer.get()

    def compile(self, form: ResponseFormat, tenant: str = "", check: Check = no_check) -> Grammar:
        """The grammar of `form`. One is compiled at a time: this waits for `tenant`'s turn.

        Raises `SchemaError` for a schema that allows nothing, is not supported, or takes too much
        time or memory. Raises `InputError` for a tokenizer that cannot be used. Raises
        `MissingExtraError` without llguidance, and what `check` raises while this waits.
        """
        tokenizer = self._tokenizer.get()  # slow at the first call, but not because of the schema
        if (found := self.kept.get(form)) is not None:
            return found
        with self._tokenizer.lock.hold(tenant, check=check):
            if (found := self.kept.get(form)) is None:  # another thread may have made it meanwhile
                size_bytes = _tried(_parts(form), check)
                found = Grammar(_compiled(tokenizer, form), self._tokenizer)
                self.kept.put(form, found, size_bytes)
            return found


def _parts(form: ResponseFormat) -> list[tuple[str, str]]:
    """All that is compiled for `form`, as `trial` takes it."""
    if form.calls is None:
        return [("schema", form.schema)]
    schemas = [form.schema, *(schema for _, schema in form.calls.tools)]
    return [
        *(("schema", schema) for schema in schemas if schema),
        ("grammar", _call_grammar(form.calls, form.schema)),
    ]


def _tried(parts: Sequence[tuple[str, str]], check: Check) -> int:
    """Compile grammars in a process that can be ended; returns the bytes of memory that they take.

    Raises `SchemaError` if they take too much time or memory, `DeadlineError` on a machine that is
    too busy, and what `check` raises.
    """
    command = [sys.executable, "-P", trial.__file__, f"{COMPILE_S:g}", str(COMPILE_BYTES)]
    ends = time.monotonic() + WAIT_S
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdin is not None
        give = partial(_give, process.stdin, json.dumps(parts).encode())
        process.stdin = None
        giving = None
        try:
            # on a thread: what a pipe does not hold is written as fast as the process reads
            giving = begun(give, "ragkv-form", "the request's own thread writes the form")
            if giving is None:
                give()
            told = None
            while told is None:
                check()
                if time.monotonic() > ends:
                    raise DeadlineError(
                        f"The form of the answer was not compiled within {WAIT_S:g} s, because the "
                        "machine is busy. Ask again."
                    )
                told = _told(process)
        finally:
            process.kill()
            if giving is not None:
                giving.join()
    if process.returncode == -signal.SIGPROF:
        raise SchemaError("", f"it takes more than {COMPILE_S:g} s to compile")
    if process.returncode != 0:  # llguidance ends the process that gets no memory
        raise SchemaError("", f"it takes more than {COMPILE_BYTES} bytes of memory to compile")
    return int(told) + sum(len(text) for _, text in parts)


def _give(pipe: IO[bytes], data: bytes) -> None:
    """Write `data` to a process, which may end before it has read all, and close its input."""
    with suppress(BrokenPipeError), pipe:
        pipe.write(data)


def _told(process: "subprocess.Popen[bytes]") -> bytes | None:
    """What a process has written; `None` while it runs."""
    try:
        return process.communicate(timeout=POLL_S)[0]
    except subprocess.TimeoutExpired:
        return None


def _compiled(tokenizer: Any, form: ResponseFormat) -> Any:
    """A matcher at the beginning of `form`. Raises `SchemaError`."""
    if form.calls is None:
        matcher = _checked(tokenizer, schema=form.schema)
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error() or first.is_stopped():
            raise SchemaError("", "no text has this form")
        return matcher
    for name, schema in form.calls.tools:
        try:
            _compiled(tokenizer, ResponseFormat(schema))
        except SchemaError as error:
            named = SchemaError(error.pointer, f"{error.reason} (tool {name})")
            named.param = "tools"
            raise named from error
    if form.schema:
        _compiled(tokenizer, ResponseFormat(form.schema))
    return _checked(tokenizer, grammar=_call_grammar(form.calls, form.schema))


def _call_grammar(calls: CallFormat, schema: str) -> str:
    """The Lark grammar of calls, or of a text with `schema`: "" for calls only.

    Each schema is a rule of its own, so that its references stay its own.
    """
    key = "parameters" if calls.syntax == "parameters" else "arguments"
    begin, between, end = {
        "tagged": ("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
        "list": ("[", ", ", "]"),
    }.get(calls.syntax, ("", "", ""))
    lines = [f"text: %json {_with_options(schema, trial.OPTIONS)}"] if schema else []
    # as chat templates write calls again
    written = {**trial.OPTIONS, "item_separator": ", ", "key_separator": ": "}
    for number, (name, arguments) in enumerate(calls.tools):
        opening = f'{{"name": {json.dumps(name)}, "{key}": '
        rule = _with_options(arguments, written)
        lines += [
            f'call{number}: {json.dumps(opening)} args{number} "}}"',
            f"args{number}: %json {rule}",
        ]
    more = f" ({json.dumps(between)} call){{0,{calls.most - 1}}}" if calls.most > 1 else ""
    all_calls = " ".join(
        filter(None, (begin and json.dumps(begin), "call" + more, end and json.dumps(end)))
    )
    one = "call: " + " | ".join(f"call{number}" for number in range(len(calls.tools)))
    return "\n".join(
        ["start: text | calls" if schema else "start: calls", f"calls: {all_calls}", one, *lines]
    )


def _with_options(schema: str, options: Mapping[str, Any]) -> str:
    """A schema with options of the compiler, as JSON."""
    return json.dumps({**json.loads(schema), "x-guidance": dict(options)}, ensure_ascii=False)


def _checked(tokenizer: Any, schema: str = "", grammar: str = "") -> Any:
    """As `trial.matcher`. Raises `SchemaError` if there is none."""
    try:
        made = trial.matcher(tokenizer, schema, grammar)
    except ValueError as error:
        raise SchemaError("", str(error)) from error
    if made.is_error():
        raise SchemaError("", _first_line(made.get_error()))
    return made


def _first_line(message: str) -> str:
    """The compiler's message without its dumps: the first line, and the reason of a regex error."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    reasons = [line for line in lines if line.startswith("error:")]
    return (" ".join([lines[0], *reasons]) if lines else "unknown reason")[:300].rstrip(".:")


def _without_added_space(tokenizer: str) -> str:
    """A tokenizer's JSON that puts no space before a text: the compiler would force that space into
    answers.
    """
    parts = json.loads(tokenizer)
    parts["truncation"] = parts["padding"] = None
    parts["normalizer"] = _without_prepend(parts.get("normalizer"))
    for step in _steps(parts.get("pre_tokenizer"), "pretokenizers"):
        if step["type"] == "ByteLevel":
            step["add_prefix_space"] = False
        elif step["type"] == "Metaspace":
            step["prepend_scheme"] = "never"
            step.pop("add_prefix_space", None)
    return json.dumps(parts, ensure_ascii=False)


def _without_prepend(normalizer: Any) -> Any:
    if not normalizer or normalizer["type"] == "Prepend":
        return None
    if normalizer["type"] == "Sequence":
        steps = [step for step in normalizer["normalizers"] if step["type"] != "Prepend"]
        return {**normalizer, "normalizers": steps}
    return normalizer


def _steps(step: Any, inner: str) -> list[Any]:
    if not step:
        return []
    return (
        [one for part in step[inner] for one in _steps(part, inner)]
        if step["type"] == "Sequence"
        else [step]
    )
