"""Answers that must have a form: a JSON object, or JSON that a schema allows.

    form = ResponseFormat.json_schema({"type": "object", "properties": {"year": {"type": "integer"}}})
    engine.answer(question, chunks, response_format=form)

`Grammars` compiles a form for one tokenizer. Each answer gets its own `TokenConstraint`: before a token is chosen, it
forbids the tokens that the form does not allow. The package knows no model, no prompt and no batch. It needs the extra
`structured`, which is imported when the first constrained answer is asked for (docs/structured.md).
"""

from .grammar import Grammar, Grammars, TokenConstraint
from .response_format import CallSyntax, ResponseFormat, parse
from .token_bytes import ConstraintTokenizer

__all__ = ["CallSyntax", "ConstraintTokenizer", "Grammar", "Grammars", "ResponseFormat", "TokenConstraint", "parse"]
