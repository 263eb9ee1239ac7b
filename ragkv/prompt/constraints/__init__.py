"""Answers that must have a form: a JSON object, or JSON that a schema allows.

    year = {"type": "object", "properties": {"year": {"type": "integer"}}}
    engine.answer(question, chunks, response_format=ResponseFormat.json_schema(year))

`grammar.Grammars` compiles a form for one tokenizer. Each answer gets its own `TokenConstraint`:
before a token is chosen, it forbids the tokens that the form does not allow. The package knows no
model, no prompt and no batch. The compiler, the extra `structured`, is imported with the first
constrained answer (docs/api.md).
"""

from .response_format import CallSyntax, ResponseFormat, parse

__all__ = ["CallSyntax", "ResponseFormat", "parse"]
