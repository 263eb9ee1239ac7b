"""The connector's report on a prompt, and how the engine in front of vLLM reads it.

A request names its report (`kv_transfer_params.ragkv.name`). vLLM leaves the report out of streamed
responses, so a second request, of one token, asks for it by this name (`report_of`). Its answer
also names the model whose KV the connector reads, so that no answer of another model is accepted.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ragkv.prompt import Prompt, PromptReport
from ragkv.store.entry import Identity
from ragkv.types import PromptSpan, Reuse, Timing

Run = tuple[str, int, int, int | None]  # kind, start, stop, and index of the chunk

LEFT = "vLLM computed this prompt"


def fused_report(prefill: PromptReport, promised: int) -> dict[str, Any]:
    """The report of a prompt whose first `promised` tokens ragkv made; vLLM computed the others."""
    return {
        "promised_tokens": promised,
        "reuse": dataclasses.asdict(prefill.reuse),
        "timing": dataclasses.asdict(prefill.timing),
        "spans": [dataclasses.asdict(span) for span in prefill.spans],
        "notes": [],
        "why": LEFT,
    }


def left_report(why: str = "", missed: Sequence[int] = ()) -> dict[str, Any]:
    """The report of a prompt that vLLM computed; `missed` are the lengths of its chunks without KV,
    where known.
    """
    reuse = Reuse(missed_chunks=len(missed), missed_tokens=sum(missed))
    report = fused_report(PromptReport(reuse=reuse, timing=Timing(), spans=()), 0)
    return {**report, "notes": [why] if why else [], "why": why or LEFT}


def cached_report(report: Mapping[str, Any], cached: int, state: str) -> dict[str, Any]:
    """The report of a prompt that vLLM computed, but for its first `cached` tokens, which vLLM's
    prefix cache had in this state: exact or fused.
    """
    reuse = {**report["reuse"], state: cached, "compute": 0.0}
    spans = [dataclasses.asdict(PromptSpan("prefix", 0, cached, state))]
    return {**report, "promised_tokens": cached, "reuse": reuse, "spans": spans}


def connector_answer(
    report: Mapping[str, Any] | None, identity: Identity, ratio: float | None, selector: str
) -> Any:
    """What the connector answers to `report_of`; `ratio` and `selector` are those of requests that
    name none.
    """
    own = {"identity": identity.stored_fields(), "ratio": ratio, "selector": selector}
    return {"report": None if report is None else dict(report), **own}


def prompt_report(
    prompt: Prompt,
    report: Mapping[str, Any],
    sent_s: float,
    first_token_s: float,
    notes: Iterable[str] = (),
) -> PromptReport:
    """The prompt's report: its tokens are counted once, each as ragkv reused it or as vLLM computed
    it.

    `prefill_s` is the time from sending the prompt to its first token, waiting inside vLLM
    included. Raises `KeyError`, `TypeError` or `ValueError` for a report of another form.
    """
    length = len(prompt.token_ids)
    promised = int(report["promised_tokens"])
    made = Reuse(**report["reuse"])
    reuse = dataclasses.replace(
        made,
        computed=length - made.exact - made.fused - made.recomputed,
        # tokens ragkv passed, and vLLM's after them
        compute=(made.compute * made.tokens + length - promised) / length,
        notes=(*made.notes, *report["notes"], *prompt.notes, *notes),
        decision=tuple(made.decision),
    )
    timing = Timing(
        prefill_s=first_token_s - sent_s,
        first_token_s=first_token_s,
        load_s=report["timing"]["load_s"],
        fuse_s=report["timing"]["fuse_s"],
    )
    found = [
        PromptSpan(**{**span, "recomputed_at": tuple(span["recomputed_at"])})
        for span in report["spans"]
    ]
    spans = tuple(_spans(_runs(prompt), found, report["why"]))
    return PromptReport(reuse=reuse, timing=timing, spans=spans)


def _runs(prompt: Prompt) -> Iterator[Run]:
    """The runs of a prompt, in order."""
    lengths = (
        ("prefix", len(prompt.prefix), None),
        ("history", len(prompt.past_ids), None),
        *(
            ("template" if index is None else "chunk", len(ids), index)
            for ids, index in prompt.body
        ),
        ("question", prompt.question_tokens, None),
        ("template", len(prompt.tail) - prompt.question_tokens, None),
    )
    at = 0
    for kind, tokens, chunk in lengths:
        if tokens:
            yield kind, at, at + tokens, chunk
        at += tokens


def _spans(runs: Iterable[Run], found: Sequence[PromptSpan], why: str) -> Iterator[PromptSpan]:
    """The runs, cut where the connector's spans begin and end. What it did not reuse was
    computed.
    """
    reused = [span for span in found if span.state != "computed"]
    reasons = {span.start: span.why for span in found if span.why}
    for kind, start, stop, chunk in runs:
        at = start
        reason = reasons.get(start, why) if chunk is not None else None
        for span in reused:
            begins = max(start, span.start)
            ends = min(stop, span.start + span.tokens)
            if begins >= ends:
                continue
            if at < begins:
                yield PromptSpan(kind, at, begins - at, "computed", (), chunk, reason)
            here = tuple(
                span.start + one - begins
                for one in span.recomputed_at
                if begins <= span.start + one < ends
            )
            yield PromptSpan(kind, begins, ends - begins, span.state, here, chunk)
            at = ends
        if at < stop:
            yield PromptSpan(kind, at, stop - at, "computed", (), chunk, reason)


def differences(identity: Identity, theirs: Mapping[str, Any]) -> list[str]:
    """What differs between this engine's identity and the connector's, in words; the tenant is not
    compared.
    """
    mine = identity.stored_fields()
    shown = {"dtype", "codec", "adapter", "format_version"}
    return [
        f"{name} ({theirs.get(name)} there, {own} here)" if name in shown else name
        for name, own in mine.items()
        if name not in ("tenant", "behind") and theirs.get(name) != own
    ]
