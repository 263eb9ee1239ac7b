"""The formats of documents: which ending is read by which loader.

A format is a row here and a function. Its module is imported with its first file.
"""

from pkgutil import resolve_name

from .reading import Loader

_TEXT = "text:load_text"
_PROGRAM = "text:load_program"

# Both are read as plain text; text for people may be about escapes.
_FOR_PEOPLE = ".txt .text .md .markdown .mdx .rmd .qmd .rst .adoc .org .tex .bib .xml"
_FOR_PROGRAMS = """.log .json .jsonc .geojson .yaml .yml .toml .ini .cfg .conf .properties .po
    .py .js .mjs .ts .jsx .tsx .css .scss .java .kt .scala .groovy .c .h .cc .cpp .cxx .hpp .cs .go .rs .swift .m .rb
    .php .pl .lua .r .jl .dart .ex .exs .erl .hs .ml .clj .lisp .sh .bash .zsh .fish .ps1 .bat .sql .proto .graphql
    .tf .cmake .gradle .vue .svelte"""

# Ending: module of this package, and the function in it.
FORMATS = {
    **dict.fromkeys(_FOR_PEOPLE.split(), _TEXT),
    **dict.fromkeys(_FOR_PROGRAMS.split(), _PROGRAM),
    ".srt": "subtitles:load_subtitles",
    ".vtt": "subtitles:load_subtitles",
    ".html": "html:load_html",
    ".htm": "html:load_html",
    ".xhtml": "html:load_html",
    ".csv": "delimited:load_csv",
    ".tsv": "delimited:load_csv",
    ".tab": "delimited:load_csv",
    ".jsonl": "json_lines:load_jsonl",
    ".ndjson": "json_lines:load_jsonl",
    ".ipynb": "notebooks:load_notebook",
    ".pdf": "pdf:load_pdf",
    ".docx": "office.word:load_docx",
    ".docm": "office.word:load_docx",
    ".dotx": "office.word:load_docx",
    ".dotm": "office.word:load_docx",
    ".pptx": "office.slides:load_pptx",
    ".pptm": "office.slides:load_pptx",
    ".xlsx": "office.sheets:load_xlsx",
    ".xlsm": "office.sheets:load_xlsx",
    ".xltx": "office.sheets:load_xlsx",
    ".xltm": "office.sheets:load_xlsx",
    ".epub": "epub:load_epub",
    ".eml": "mail:load_mail",
}
KNOWN = "text, source code, " + " ".join(
    one for one, by in FORMATS.items() if by not in (_TEXT, _PROGRAM)
)


def loader_of(suffix: str) -> Loader:
    """What reads files with this ending. Others are read as plain text: for people, if there is no
    ending.
    """
    other = _PROGRAM if suffix else _TEXT
    loader: Loader = resolve_name(f"{__package__}.{FORMATS.get(suffix, other)}")
    return loader
