"""Flags from dataclass fields: the flag, help and default of a setting are written once, beside the field. No torch.

    seed: int = option(0, "Random seed.", "run probe")

`with_flags` gives a command the options of such a dataclass, and `words` turns values back into what a user types.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import NoneType
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

from headwise.errors import HeadwiseError
from headwise.registry import names

ANY = inspect.Parameter.POSITIONAL_OR_KEYWORD


@dataclass(frozen=True, slots=True)
class Flag:
    """How a setting is given on the command line. Commands are separated by spaces."""

    help: str
    commands: str  # those that take it
    group: str | None = None  # heading in the help text
    value: str | None = None  # what stands for the value in the help text
    required: str = ""  # commands that do not run without it
    flag: str = ""  # where it is not the name of the field
    plug_ins: str = ""  # package whose modules can be named; the help text lists them below
    argument: bool = False  # given without a flag
    commas: bool = False  # a tuple is one text with commas; otherwise the flag is repeated
    least: int | None = None  # smallest value


def option(
    default: Any, help: str, commands: str, group: str | None = None, value: str | None = None, **more: Any
) -> Any:
    """A field of a dataclass that is also a flag; a default of `...` means that it must be given."""
    kept = {} if default is ... else {"default": default}
    return field(**kept, metadata={"flag": Flag(help, commands, group, value, **more)})


class Setting(NamedTuple):
    """A field of a dataclass that has a flag."""

    name: str
    kind: Any
    flag: Flag
    default: Any

    @property
    def written(self) -> str:
        """The flag as it is typed: --eval-tokens."""
        return f"--{self.flag.flag or self.name.replace('_', '-')}"

    @property
    def opposite(self) -> str | None:
        """`--no-stream` where a switch is on by default, or where the program chooses if it is not given."""
        chosen = {bool, NoneType} == set(get_args(self.kind)) or self.default is True
        return f"--no-{self.written[2:]}" if chosen else None

    @property
    def placeholder(self) -> str | None:
        """What stands for the value in the help text; None for a switch and where the name says enough."""
        numbers = {int, float} & {self.kind, *get_args(self.kind)}
        return self.flag.value or ("NAME" if self.flag.plug_ins else "N" if numbers else None)

    def parsed(self, value: Any) -> Any:
        """A value from the command line as the dataclass has it."""
        if self.flag.commas:
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return tuple(value or ()) if isinstance(self.default, tuple) else value

    def words(self, value: Any) -> list[str]:
        """What to type for a value; nothing for None."""
        if value is None or value is False:
            return [self.opposite] if value is False and self.opposite else []
        if self.flag.argument:
            return [str(value)]
        if value is True:
            return [self.written]
        several = value if isinstance(value, (list, tuple)) and not self.flag.commas else [value]
        texts = [",".join(one) if isinstance(one, (list, tuple)) else str(one) for one in several]
        return [word for text in texts if text for word in (self.written, text)]

    def completed(self, begun: str) -> list[str]:
        """The plug-ins whose names begin so, for the shell's completion."""
        return [name for name in names(self.flag.plug_ins) if name.startswith(begun)]

    def parameter(self, command: str) -> inspect.Parameter:
        """The field as Typer wants it: a parameter with a type, an option and a default."""
        import typer

        kind, default = self.kind, self.default
        if isinstance(default, tuple):
            kind, default = (str, ",".join(default)) if self.flag.commas else (list[str], [])
        if default is MISSING or command in self.flag.required.split():
            default = inspect.Parameter.empty
        typed = "/".join(filter(None, (self.written, self.opposite)))
        make = typer.Argument if self.flag.argument else functools.partial(typer.Option, typed)
        option = make(
            help=self.flag.help,
            metavar=self.placeholder,
            rich_help_panel=self.flag.group,
            autocompletion=self.completed if self.flag.plug_ins and not self.flag.value else None,
        )
        annotation = Annotated[kind, option]  # type: ignore[valid-type]
        return inspect.Parameter(self.name, ANY, default=default, annotation=annotation)


@functools.cache
def described(settings: type) -> tuple[Setting, ...]:
    """The fields of a dataclass that have a flag, in their order."""
    kinds, flagged = get_type_hints(settings), (one for one in fields(settings) if "flag" in one.metadata)
    return tuple(Setting(one.name, kinds[one.name], one.metadata["flag"], one.default) for one in flagged)


def settings_of(settings: type, command: str) -> list[Setting]:
    """Those that a command takes."""
    return [setting for setting in described(settings) if command in setting.flag.commands.split()]


def with_flags(settings: type, command: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a function the options that `command` has in a dataclass; it gets their values as a dict, `settings`.

    Typer reads the signature of a function, so the options become parameters of a wrapper, before the function's own.
    """
    known = settings_of(settings, command)

    def wrap(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(**given: Any) -> None:
            function(settings={setting.name: setting.parsed(given.pop(setting.name)) for setting in known}, **given)

        own = inspect.signature(function, eval_str=True).parameters.values()
        every = [setting.parameter(command) for setting in known] + [p for p in own if p.name != "settings"]
        every.sort(key=lambda parameter: parameter.default is not parameter.empty)  # required ones first
        run.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
        return run

    return wrap


def words(settings: type, command: str, values: Mapping[str, Any]) -> list[str]:
    """What to type behind `headwise COMMAND` for these values; what is None or not among them is left out."""
    return [word for setting in settings_of(settings, command) for word in setting.words(values.get(setting.name))]


def check_smallest(settings: Any) -> None:
    """Refuse a number below the smallest one that its flag allows."""
    kind: Any = type(settings)
    for setting in described(kind):
        value, least = getattr(settings, setting.name), setting.flag.least
        if least is not None and value is not None and value < least:
            raise HeadwiseError(f"{setting.name} is {value}; it must be at least {least}.")
