"""The settings of a call, under LangChain's names, as options of `Engine.stream`."""

from collections.abc import Mapping
from typing import Any, cast

from ragkv.errors import InputError, UnsupportedError
from ragkv.prompt import AnswerOptions
from ragkv.prompt.constraints import parse

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("repetition_penalty", "no_repeat_ngram_size", "min_new_tokens"),
)
LOGPROBS = ("logprobs", "top_logprobs")
TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
FUSION = ("ratio", "selector", "reuse")
OWN = ("model", "max_tokens", "documents", "session_id", "response_format", *TOOLS, *LOGPROBS, *FUSION, *SAMPLING)
NOT_OFFERED = {"functions": "the old form of tools"}
_LANGCHAIN = ("ls_structured_output_format", "stream_usage")  # added by LangChain itself; ignored


def refuse_unknown(call: Mapping[str, Any]) -> None:
    """Raises `InputError` for a setting that would be ignored, `UnsupportedError` for one that is not offered."""
    for name, value in call.items():
        if name in NOT_OFFERED and value:
            raise UnsupportedError(f"{name} was given, but {NOT_OFFERED[name]} is not offered yet. Leave it out.")
    unknown = sorted(call.keys() - set(OWN) - set(NOT_OFFERED) - set(_LANGCHAIN))
    if unknown:
        raise InputError(f"Unknown settings of a call: {', '.join(unknown)}. Known: {', '.join(sorted(OWN))}.")


def answer_options(settings: Mapping[str, Any]) -> AnswerOptions:
    """The engine's options for these settings. A setting that is `None` is left to the engine."""
    names = ("selector", "reuse", *SAMPLING)
    options = {name: settings[name] for name in names if settings[name] is not None}
    if (form := parse(settings["response_format"])) is not None:
        options["response_format"] = form
    if settings["logprobs"]:
        options["logprobs"] = settings["top_logprobs"] or 0
    elif settings["top_logprobs"]:
        raise InputError("top_logprobs need logprobs: set it to True.")
    if settings["ratio"] is not None:
        options["ratio"] = None if settings["ratio"] == "auto" else settings["ratio"]
    return cast("AnswerOptions", {**options, "max_new_tokens": settings["max_tokens"]})
