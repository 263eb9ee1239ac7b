"""Schemathesis loads this file. What fits the schema is accepted, but for the refusals that are named here.

A schema cannot say everything: what values mean together, or how many tokens a text has.
"""

import os
import re
from typing import Any

import schemathesis
from schemathesis.openapi.checks import RejectedPositiveData
from schemathesis.specs.openapi.checks import positive_data_acceptance

VALID_ID = r"[A-Za-z0-9_-]{1,128}"  # of a response, as the schema has it

FILTER = r"filter: \d+ (values|characters) are too many"  # over all conditions together
CONDITIONS = r"The filter has \d+ conditions"  # over all names together
PROMPT = r"The prompt has \d+ tokens|Prompt .* exceed"  # as the model's tokenizer counts them
BLANK = r"has no text\."  # of blanks alone
METADATA = r"metadata"  # its size as JSON
TWINS = r"Two different documents have the id"
FILES = r"Files of type .* are not accepted|holds no text|Cannot read"  # generated files are images and empty documents

CHAT = (  # fields that do not fit each other
    r"There is no user message",
    r"With a session the last message must be the user's",
    r"stream_options require stream",
    r"max_tokens and max_completion_tokens differ",
    r"documents: \d+ documents are too many",  # with those of `rag`
    r"^top_logprobs need logprobs",
    r"^A session continues with one answer",
    r"^response_format: give json_schema if type is json_schema",
    r"^Answers cannot be constrained to the schema",  # contradictions, and keywords that cannot be kept
    r"^Two tools have the same name",
    r"^tool_choice ",  # names no tool of the request
    r"^The arguments of the call .* are no JSON object",
    r"^Token id \d+ is not in the model's vocabulary",  # a key of `logit_bias`
    r"^seed: Input should be (less|greater) than",  # a float next to the bound is read as the bound
)

FORM = (
    r"^response_format: give json_schema if type is json_schema",
    r"^Answers cannot be constrained to the schema",  # contradictions, and keywords that cannot be kept
)

RESPONSES = (
    r"^There is no user message",
    r"^stream_options require stream",
    r"^documents: \d+ documents are too many",  # with those of `rag`
    r"^text\.format: give json_schema if type is json_schema",
    r"^Answers cannot be constrained to the schema",
    r"^Two tools have the same name",
    r"^tool_choice ",  # names no tool of the request
    r"^The arguments of the call .* are no JSON object",
    r"^Token id \d+ is not in the model's vocabulary",  # a key of `logit_bias`
    r"^seed: Input should be (less|greater) than",  # a float next to the bound is read as the bound
)

COMPLETIONS = (
    r"^stream_options require stream",
    r"^n: \d+ continuations are too many",  # of all prompts together
    r"^Token id \d+ is not in the model's vocabulary",  # a key of `logit_bias`
    r"^seed: Input should be (less|greater) than",  # a float next to the bound is read as the bound
)

# By operation, the messages of its refusals; docs/api.md lists them for people.
REFUSED: dict[str, tuple[str, ...]] = {
    "POST /v1/ask": (FILTER, CONDITIONS, PROMPT, *FORM),
    "POST /v1/compare": (FILTER, CONDITIONS, PROMPT),
    "POST /v1/collections/{name}/search": (FILTER, CONDITIONS),
    "POST /v1/collections/{name}/documents": (BLANK, METADATA, TWINS, FILES),
    "PUT /v1/collections/{name}/documents/{document_id}": (BLANK, METADATA),
    "POST /v1/chat/completions": (FILTER, CONDITIONS, PROMPT, *CHAT),
    "POST /v1/responses": (FILTER, CONDITIONS, PROMPT, *RESPONSES),
    "POST /v1/completions": (PROMPT, *COMPLETIONS),
    "POST /v1/embeddings": (r"^dimensions is \d+",),  # the model's own number alone
}


@schemathesis.check
def positive_data_acceptance_but_for_named_refusals(ctx: Any, response: Any, case: Any) -> None:
    """Schemathesis' own check, which fails for no refusal of `REFUSED`."""
    try:
        positive_data_acceptance(ctx, response, case)
    except RejectedPositiveData as error:
        message = response.json()["error"]["message"]
        if not any(re.search(refusal, message) for refusal in REFUSED.get(case.operation.label, ())):
            raise AssertionError(f"{case.operation.label}: {message}") from error


@schemathesis.hook.apply_to(operation_id="embeddings")
def map_body(context: Any, body: Any) -> Any:  # noqa: ARG001 - schemathesis wants these names
    """Name the served embedding model, or every request would get 404."""
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        return {**body, "model": os.environ["SERVED_EMBEDDING_MODEL"]}
    return body


@schemathesis.hook.apply_to(operation_id=["show_response", "delete_response"])
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    """Name a stored response in place of every second valid id: that of one is never drawn by chance.

    Ids that do not fit the pattern stay: what is wrong with such a request may be its id alone.
    """
    parameters = path_parameters or {}
    drawn = str(parameters.get("response_id", ""))
    if len(drawn) % 2 or not re.fullmatch(VALID_ID, drawn):
        return path_parameters
    stored = "KEPT_RESPONSE" if context.operation.method.upper() == "GET" else "RESPONSE_TO_DELETE"
    return {**parameters, "response_id": os.environ[stored]}
