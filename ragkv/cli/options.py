"""The options that many commands take, and the engine and corpus that they describe."""

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ragkv.config import WEIGHTS, EngineConfig
from ragkv.errors import ConfigError, InputError, StoreLockedError
from ragkv.home import VARIABLE, KnownHome, locate
from ragkv.registry import RETRIEVERS, SELECTORS
from ragkv.runtime import loading_objects, server_file
from ragkv.runtime.setting_values import FILE_VARIABLE, gather, overlay, toml_values

from .output import print_note, working

if TYPE_CHECKING:
    from ragkv.engine import Engine
    from ragkv.prompt import AnswerOptions
    from ragkv.rag import Rag

# Commands that run in the folder of this file take their settings from it.
FILE = Path("ragkv.toml")


def file_defaults(file: Path | None) -> dict[str, str]:
    """The options that a settings file gives a default: the home and the model."""
    values = toml_values(file) if file is not None else {}
    return {name: values[name] for name in ("home", "model") if name in values}


def settings_file() -> Path | None:
    """The settings file of a command without `--config`."""
    named = os.environ.get(FILE_VARIABLE)
    return Path(named) if named else FILE if FILE.is_file() else None


def _use_file(context: typer.Context, file: Path | None) -> Path | None:
    """The settings file, whose defaults the command's other options take."""
    if file is None:
        return settings_file()
    context.default_map = file_defaults(file)
    return file


DTYPES = ("auto", "float32", "bfloat16", "float16")
if TYPE_CHECKING:
    SelectorChoice = str
    RetrieverChoice = str
    DtypeChoice = str
    WeightsChoice = str
else:  # typer shows the choices in the help, and refuses all others
    SelectorChoice = Literal[tuple(SELECTORS)]
    RetrieverChoice = Literal[tuple(RETRIEVERS)]
    DtypeChoice = Literal[DTYPES]
    WeightsChoice = Literal[WEIGHTS]

# The help shows this as the default of an option that the settings give.
FROM_SETTINGS = "from the settings"
# The help shows options in these groups.
CORPUS = "Corpus and model"
SEARCH = "Retrieval"
ANSWER = "Answer"


def _of_settings(help: str, panel: str = CORPUS, **how: Any) -> Any:
    """An option whose default the settings give."""
    return typer.Option(rich_help_panel=panel, show_default=FROM_SETTINGS, help=help, **how)


Home = Annotated[
    Path,
    typer.Option(
        envvar="RAGKV_HOME", rich_help_panel=CORPUS, help="Folder of this corpus's index and KV."
    ),
]
Model = Annotated[
    str,
    typer.Option(
        envvar=VARIABLE,
        rich_help_panel=CORPUS,
        show_default="the home's, else smollm2",
        help="smollm2, a model folder, a GGUF file or a hub id.",
    ),
]
Settings = Annotated[
    Path | None,
    typer.Option(
        "--config",
        is_eager=True,
        callback=_use_file,
        rich_help_panel=CORPUS,
        help=f"TOML file of settings; else the one in {FILE_VARIABLE}, else {FILE} if it is here.",
    ),
]
Device = Annotated[str | None, _of_settings("cpu, cuda, cuda:1 ...")]
Dtype = Annotated[
    DtypeChoice | None,
    _of_settings(f"Number format of weights and KV: {', '.join(DTYPES)}.", metavar="NAME"),
]
Adapter = Annotated[
    str | None,
    _of_settings("LoRA adapter, merged into the model; its KV is stored apart.", metavar="PATH"),
]
Weights = Annotated[
    WeightsChoice | None,
    _of_settings(
        "plain, or int8: linear layers in 8 bits on a CPU, faster and rounded; its KV is stored "
        "apart.",
        metavar="KIND",
    ),
]
Passages = Annotated[
    int, typer.Option("--k", "-k", min=1, rich_help_panel=SEARCH, help="Passages to retrieve.")
]
Retriever = Annotated[
    RetrieverChoice | None,
    typer.Option(
        rich_help_panel=SEARCH,
        show_default="hybrid with an embedder, else bm25",
        help="How passages are ranked.",
    ),
]
PromptOrder = Annotated[
    Literal["best-last", "score", "document"] | None,
    typer.Option(
        rich_help_panel=SEARCH,
        help="Order of the passages in the prompt: the best last or first, or as ingested.",
        show_default="best-last",
    ),
]
Where = Annotated[
    list[str] | None,
    typer.Option(
        rich_help_panel=SEARCH,
        metavar="NAME=VALUE",
        help="Only passages with this metadata; repeatable.",
    ),
]
Ratio = Annotated[
    float | None,
    _of_settings("Share of the fused tokens that is computed again.", ANSWER, min=0, max=1),
]
SelectorName = Annotated[
    SelectorChoice | None,
    _of_settings(
        f"Which tokens are computed again: {', '.join(SELECTORS)}.", ANSWER, metavar="NAME"
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        min=0,
        rich_help_panel=ANSWER,
        help="0 decodes greedily; above 0 samples, more freely if higher.",
    ),
]
MaxNewTokens = Annotated[
    int, typer.Option(min=1, rich_help_panel=ANSWER, help="Longest answer, in tokens.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document instead of text.")]
HOME = Path(".ragkv")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options from which a command builds its engine and corpus."""

    home: Home = HOME
    model: Model = ""
    settings: Settings = None
    device: Device = None
    dtype: Dtype = None
    adapter: Adapter = None
    weights: Weights = None

    @property
    def uses_server_settings(self) -> bool:
        """Whether a server of the home, whatever its settings are, may answer in place of an engine
        of these.
        """
        return (
            self.device is None
            and self.dtype is None
            and self.adapter is None
            and self.weights is None
        )

    @property
    def known_home(self) -> KnownHome:
        """The home, and the model to use with it. Raises `ConfigError` if it was made with another
        one.
        """
        return KnownHome.at(self.home, self.model)

    def config(self) -> EngineConfig:
        """What the home keeps, overridden by the TOML file, by the environment, and by these
        options.
        """
        options = {
            "device": self.device,
            "dtype": self.dtype,
            "adapter": self.adapter,
            "weights": self.weights,
        }
        given = {name: value for name, value in options.items() if value is not None}
        values = overlay(gather(self.settings), given)
        return self.known_home.config(EngineConfig.from_settings(values))

    def check_writable(self) -> None:
        """Raise `StoreLockedError` if another process writes to the store now. Loads neither torch
        nor the model.
        """
        from ragkv.store.writer_lock import check_unlocked

        store = self.config().store
        if store.directory is not None and not store.read_only:
            try:
                check_unlocked(store.directory)
            except StoreLockedError as error:
                if (server := server_file.load(self.home)) is None:
                    raise
                raise StoreLockedError(
                    f"The server at {server.url} (pid {server.pid}) has {self.home}. `ragkv ask`, "
                    "`chat` and `ingest` work through it, without options of the model; stop it "
                    f"for anything else: kill {server.pid}",
                    error.holder,
                ) from error

    @contextmanager
    def engine(
        self, reads: bool = False, index_only: bool = False, brief: bool = False
    ) -> Iterator["Engine"]:
        """The engine; closed at the end. Raises `StoreLockedError` before the model is loaded.

        For a command that only `reads`, to answer one question, the store is opened read-only
        instead, with a note; for one that writes the `index_only`, without. `brief`: the command
        computes nothing.
        """
        config = self.config()
        try:
            if index_only:
                config = replace(config, store=replace(config.store, read_only=True))
            else:
                self.check_writable()
        except StoreLockedError as error:
            if not reads:
                raise
            print_note(
                f"{error.holder} writes to {self.home}: it is opened read-only, and no new KV is "
                "stored."
            )
            config = replace(config, store=replace(config.store, read_only=True))
        locate(self.known_home.model)  # a wrong name is told before anything is loaded
        # copying the weights of a large one takes seconds
        with working("loading the model"), loading_objects():
            from ragkv.engine import Engine
            from ragkv.model.loading import quiet_transformers

            quiet_transformers()
            loaded = Engine.from_pretrained(
                self.known_home.model, config, brief=brief or reads or index_only
            )
        with loaded as engine:
            if (choice := engine.model.dtype_choice).measured:
                print_note(f"the model computes in {choice.why}.")
            if (why := engine.entries.why_not_reused) is not None:
                print_note(f"{why}.")
            yield engine

    @contextmanager
    def rag(
        self,
        chunk_tokens: int | None = None,
        *,
        reads: bool = False,
        index_only: bool = False,
        brief: bool = False,
    ) -> Iterator["Rag"]:
        """The corpus on its engine; both closed at the end. The rest is as for `engine`."""
        with ExitStack() as stack:
            engine = stack.enter_context(self.engine(reads, index_only, brief))
            stack.enter_context(warnings.catch_warnings())
            # from other packages; the user cannot fix them
            warnings.simplefilter("ignore", DeprecationWarning)
            with working("loading the embedder"), loading_objects():
                from ragkv.rag import Corpus, Rag

                corpus = Corpus.open(
                    self.home,
                    self.model,
                    engine=engine,
                    chunk_tokens=chunk_tokens,
                    writes=index_only or None,
                )
            yield stack.enter_context(Rag(corpus))


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `options: EngineOptions` of `command` by the options from which it is
    made.
    """
    signature = inspect.signature(command)
    shared = inspect.signature(EngineOptions).parameters
    parameters = [
        one.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for given in signature.parameters.values()
        for one in (shared.values() if given.name == "options" else [given])
    ]

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        options = EngineOptions(**{name: arguments.pop(name) for name in shared})
        command(options=options, **arguments)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def require_index(home: Path) -> None:
    """Raise `InputError` if nothing was ingested at `home`."""
    from ragkv.store.writer_lock import check_unlocked

    if not (home / "index").is_dir():
        check_unlocked(home / "kv")  # the process that writes there may just have started
        raise InputError(
            f"Nothing was ingested at {home}: run `ragkv ingest PATH --home {home}` first."
        )


def note_writer(home: Path) -> None:
    """Say that another process writes to the home, if one does: what is read from it may change."""
    from ragkv.store.writer_lock import check_unlocked

    try:
        check_unlocked(home / "kv")
    except StoreLockedError as error:
        print_note(f"{error.holder} writes to {home}: this is what it holds now.")


def command_group(help: str, **settings: Any) -> typer.Typer:
    """A group of commands that shows its help, with exit status 0, if it is called without a
    command.
    """
    group = typer.Typer(help=help, invoke_without_command=True, **settings)
    group.callback()(show_help)
    return group


def show_help(context: typer.Context) -> None:
    """Print a group's help if it was called without a command."""
    if context.invoked_subcommand is None:
        context.get_help()  # typer prints it


def answer_options(
    ratio: float | None, selector: str | None, temperature: float, max_new_tokens: int
) -> "AnswerOptions":
    """The engine's options for these options of a command."""
    options: AnswerOptions = {
        "selector": selector,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
    }
    if ratio is not None:
        options["ratio"] = ratio
    return options


def metadata_filter(pairs: Sequence[str] | None) -> dict[str, Any]:
    """The filter of `--where` options."""
    filters: dict[str, Any] = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--where {pair!r} does not have the form name=value.")
        filters[name] = value
    return filters
