"""Compiles grammars in a process of its own and reports their time and memory. Run as a program.

llguidance bounds the work of a token, but not the work of joining the automata of a grammar. That
work can take minutes and gigabytes, and a thread cannot be ended. So every new form is compiled
here first, under limits of time and memory. A form that passes takes no more where it is used,
because its automata do not depend on the vocabulary. The vocabulary here has a token for each byte.

The program imports nothing of ragkv, so it starts in a tenth of a second.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

LEXER_STATES = 50_000  # A grammar has at most `LEXER_STATES`, of 1 to 2 KB each.
# On one line, with at most one space after a separator: a model can fill any number of tokens with
# white space.
OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "lenient": False,
    "coerce_one_of": False,
}


def matcher(tokenizer: Any, schema: str = "", grammar: str = "") -> Any:
    """A matcher at the beginning of a JSON schema, or of a grammar in Lark's syntax.

    The matcher tells of a grammar that cannot be compiled. Raises `ValueError` for a schema that
    cannot be read.
    """
    from llguidance import LLMatcher, LLParserLimits

    if schema:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=OPTIONS)  # type: ignore[arg-type]
    limits = LLParserLimits(max_lexer_states=LEXER_STATES, verbose_errors=False)
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def _held(what: str) -> int:
    """Bytes of this process, by their name in Linux's status. 0 where it is not Linux.

    `getrusage` would tell the peak of the process that began this one, if that is higher.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return 0
    return 1024 * int(status.split(f"{what}:")[1].split()[0])


def _limit(seconds: float, memory_bytes: int) -> None:
    """End this process after so many seconds of processor time, or when it takes so much more
    memory.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF, which nothing handles
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if held := _held("VmSize"):
        most = held + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> None:
    """Compile what standard input lists, and print the bytes of memory that it took."""
    from llguidance import LLTokenizer

    tokenizer = LLTokenizer("byte")
    grammars = json.load(sys.stdin.buffer)
    before = _held("VmHWM")
    _limit(float(sys.argv[1]), int(sys.argv[2]))
    for kind, text in grammars:
        try:
            matcher(tokenizer, **{kind: text}).deep_copy().compute_bitmask()
        except ValueError:
            continue  # whoever compiles it in earnest finds the same, and has the words for it
    print(_held("VmHWM") - before)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
