"""Groups of options: a dataclass that several commands take as one parameter, and that a file may
set.

A command declares `engine: EngineOptions = EngineOptions()`; on the command line these are the
dataclass's fields, one option each, and the command gets the object. `table_options` makes such a
group of a table of parameters (`quire.field_checks`), so that a new line there is a new option here.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

import typer
from typer import Argument, Option
from typer.models import OptionInfo

from quire.cli.toml import check_value, toml_line
from quire.config import Duration, File, Memory
from quire.errors import InvalidRequestError
from quire.field_checks import Choice, Flag, Number, Pattern, Strings, Values, parameters
from quire.frontend.settings_file import SettingsFile, read_settings

MODEL_HELP = "A short name (smollm2), a folder, a .gguf file or a Hugging Face id (org/name)."
_ARGUMENT = "model_argument"


class ByPlace:
    """Marks an option that may also be given without its name, as the command's argument: `quire
    serve MODEL`.
    """

    def __init__(self, help: str = MODEL_HELP) -> None:
        self.argument = Annotated[str | None, Argument(metavar="[MODEL]", help=help)]


def chosen_model(argument: str | None, option: str | None) -> str | None:
    """The model that a command is about, named in one way, the other, or both alike."""
    if argument is not None and option is not None and argument != option:
        raise InvalidRequestError(
            "--model", f"names {option}, the command {argument}: leave one of the two out"
        )
    return option if argument is None else argument


@dataclass(frozen=True)
class OptionGroup:
    """Options that belong together. `section` is the part of a settings file that sets them, if one
    does.
    """

    section: ClassVar[str] = ""

    @classmethod
    def options(cls) -> dict[str, inspect.Parameter]:
        """By name, as typer wants to see them."""
        hints = get_type_hints(cls, include_extras=True)
        found = {}
        for one in fields(cls):
            kind = inspect.Parameter.KEYWORD_ONLY
            found[one.name] = inspect.Parameter(
                one.name, kind, default=one.default, annotation=hints[one.name]
            )
        return found

    @classmethod
    def unknown(cls, name: str, path: Path | None) -> InvalidRequestError:
        """Says that a file's section sets something that there is not."""
        known = ", ".join(cls.options())
        return InvalidRequestError(
            "config", f"{path}: {name} in [{cls.section}] is unknown; there are: {known}"
        )

    def check(self) -> None:
        """Refuses values that can't be; for groups that can tell without loading anything."""


class GivenOptions(frozenset[str]):
    """Names of the options that the command line or a settings file sets: for a command that must
    tell a default from what somebody asked for.
    """


_SHORT = {"max_tokens": "-n", "tensor_parallel_size": "-tp"}


def table_option(table: type, name: str) -> Any:
    """The option that a line of a table makes."""
    line = parameters(table)[name]
    names = [f"--{name.replace('_', '-')}"]
    if isinstance(line.values, Flag) and line.default:
        names[0] += f"/--no-{name.replace('_', '-')}"
    if name in _SHORT:
        names.append(_SHORT[name])
    several = " Repeat for several." if isinstance(line.values, Strings) else ""
    return Option(*names, metavar=_metavar(line.values), help=line.help + several)


def _metavar(values: Values) -> str | None:
    if isinstance(values, Flag):
        return None
    if isinstance(values, Choice):
        return "|".join(values.names)
    if isinstance(values, Pattern):
        return re.sub(r", | or ", "|", values.words)
    if isinstance(values, Number):
        return "N" if values.kind is int else "X"
    return {Memory: "M", Duration: "TIME", File: "FILE"}.get(type(values), "TEXT")


def _option_type(values: Values) -> Any:
    if isinstance(values, Number):
        return values.kind
    return {Flag: bool, File: Path, Strings: list[str]}.get(type(values), str)


def table_options(
    table: type, defaults: Mapping[str, Any] | None = None, without: Collection[str] = ()
) -> type[OptionGroup]:
    """A group with an option for every line of a table that is for the command line, `without`
    some; with the table's defaults where there are no others.
    """
    made: list[tuple[str, Any, Any]] = []
    for name, line in parameters(table).items():
        if line.cli and name not in without:
            default = (defaults or {}).get(name, line.default)
            if isinstance(line.values, Strings):
                default = None  # an option that is repeated
            elif isinstance(line.values, Memory) and default is not None:
                default = str(default)
            kind = _option_type(line.values)
            kind = kind | None if default is None else kind
            made.append((name, Annotated[kind, table_option(table, name)], default))
    return make_dataclass(f"{table.__name__}Options", made, bases=(OptionGroup,), frozen=True)


@dataclass(frozen=True)
class FileOptions(OptionGroup):
    """Where settings come from and go to."""

    config: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Take settings from a TOML file; what is given here goes before it.",
        ),
    ] = None
    print_config: Annotated[
        bool, Option("--print-config", help="Write all settings out as such a file, and exit.")
    ] = False


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer out of one that takes groups: their options become its own. A model that
    is marked so (`ByPlace`) may be named without `--model`.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type[OptionGroup]] = {}
    parameters = {
        "context": inspect.Parameter(
            "context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context
        ),
    }
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        if kind is GivenOptions:
            continue
        for mark in getattr(kind, "__metadata__", ()):
            if isinstance(mark, ByPlace):
                parameters[_ARGUMENT] = inspect.Parameter(
                    _ARGUMENT,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=None,
                    annotation=mark.argument,
                )
        if isinstance(kind, type) and issubclass(kind, OptionGroup):
            groups[name] = kind
            for option, one in kind.options().items():
                own = (
                    one.default
                    if parameter.default is parameter.empty
                    else getattr(parameter.default, option)
                )
                parameters[option] = one.replace(default=own)
        else:
            parameters[name] = parameter.replace(
                kind=inspect.Parameter.KEYWORD_ONLY, annotation=kind
            )

    @functools.wraps(command)
    def run(context: typer.Context, **values: Any) -> None:
        given = {name for name in values if _is_given(context, name)}
        argument = values.pop(_ARGUMENT, None)
        if argument is not None:
            values["model"] = chosen_model(argument, values["model"] if "model" in given else None)
            given.add("model")
        path: Path | None = values.get("config")
        file = SettingsFile() if path is None else read_settings(path)
        if file.model is not None and "model" in values and "model" not in given:
            values["model"] = file.model
        for name, kind in groups.items():
            own = {option: values.pop(option) for option in kind.options()}
            values[name] = _from_file(kind, own, given, file)
        made = [values[name] for name in groups]
        for group in made:
            group.check()
        for name, kind in hints.items():
            if kind is GivenOptions:
                in_file = (
                    key for one in groups.values() for key in file.sections.get(one.section, {})
                )
                values[name] = GivenOptions({*given, *in_file})
        if any(isinstance(group, FileOptions) and group.print_config for group in made):
            print(as_toml(values.get("model"), made), end="")
            raise typer.Exit()
        command(**values)

    run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return run


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")


def _from_file(
    kind: type[OptionGroup], own: dict[str, Any], given: set[str], file: SettingsFile
) -> OptionGroup:
    section = file.sections.get(kind.section, {})
    for key in section:
        if key not in own:
            raise kind.unknown(key, file.path)
    for key in own.keys() & section.keys() - given:
        annotation = kind.options()[key].annotation
        own[key] = check_value(
            f"{file.path}: {key} in [{kind.section}]", section[key], _plain_type(annotation)
        )
    return kind(**own)


def _plain_type(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def as_toml(model: str | None, groups: list[OptionGroup]) -> str:
    """A settings file that says the same, each line under what `--help` says of it."""
    lines = [
        "# Settings for `quire run`, `chat` and `serve` (--config FILE) and for LLM(config=FILE)."
    ]
    if model is not None:
        lines.append(toml_line("model", str(model)))
    for group in groups:
        if not group.section:
            continue
        lines += ["", f"[{group.section}]"]
        for name, parameter in type(group).options().items():
            info = next(
                one for one in get_args(parameter.annotation)[1:] if isinstance(one, OptionInfo)
            )
            value = getattr(group, name)
            lines.append(f"# {info.help}")
            if name == "api_key":
                lines.append(
                    "# api_key is not written out: keep keys in a file of their own (api_key_file)"
                )
            else:
                lines.append(f"# {name} is not set" if value is None else toml_line(name, value))
    return "\n".join(lines) + "\n"
