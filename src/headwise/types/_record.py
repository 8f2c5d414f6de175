"""JSON both ways for frozen dataclasses, with errors that name the field."""

import dataclasses
import functools
import json
import os
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

from headwise.errors import HeadwiseError, PlanError
from headwise.files.disk import write_atomically as write_atomically
from headwise.files.json import INTEGER, read_json, shortened

T = TypeVar("T")
VERSION = 1  # of every JSON file that Headwise writes; raised when an old reader would misread a new file


class Record:
    """Mixin for frozen dataclasses: `to_json`, `from_json`, `save`, `read`. A file names its kind and version."""

    __slots__ = ()
    USUAL = tuple[str, ...]()  # fields that JSON leaves out where they have their default value

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary that `from_json` turns back into an equal value."""
        counted = (f for f in dataclasses.fields(self) if f.compare)  # type: ignore[arg-type]
        values = ((f, getattr(self, f.name)) for f in counted)
        return {f.name: _encode(value) for f, value in values if f.name not in self.USUAL or value != f.default}

    @classmethod
    def from_json(cls, data: Any, where: str = "") -> Self:
        """The value that `data` describes; a wrong, missing or unknown field is named in the error."""
        return typing.cast(Self, _decode(cls, data, where or cls.__name__.lower()))

    @classmethod
    def from_file(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Fields as a file holds them -> fields as this class has them; the same unless a class says otherwise."""
        return data

    def save(self, path: Path) -> None:
        """Write atomically: a reader sees the old file or the new one, never half of one."""
        text = json.dumps({"headwise": type(self).__name__, "version": VERSION, **self.to_json()}, indent=1)
        write_atomically(path, text + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `save` wrote; a file of another kind or of a newer version is refused."""
        if not os.path.lexists(path):
            raise PlanError(f"{path} does not exist; run the stage that writes it first.")
        data = read_json(Path(path))
        if not isinstance(data, dict) or data.pop("headwise", None) != cls.__name__:
            raise PlanError(f"{path} does not hold a {cls.__name__}; give the file that headwise wrote.")
        version = data.pop("version", None)
        if not isinstance(version, int) or version > VERSION:
            raise PlanError(
                f"{path} has format version {str(version)[:20]}, this headwise reads up to {VERSION}; upgrade headwise."
            )
        return cls.from_json(data, Path(path).name)


def _encode(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_json()
    if isinstance(value, dict):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    return value


def _decode(kind: Any, data: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or kind is object:
        return data
    if origin in (types.UnionType, typing.Union):
        if data is None and type(None) in arguments:
            return None
        return _decode(next(a for a in arguments if a is not type(None)), data, where)
    if origin is tuple:
        if not isinstance(data, list):
            raise PlanError(f"{where} must be a list, not {shortened(data)}.")
        if _plain_numbers(arguments[0], data):  # there may be millions
            return tuple(data)
        return tuple(_decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if origin is dict:
        if not isinstance(data, dict):
            raise PlanError(f"{where} must be an object, not {shortened(data)}.")
        return {key: _decode(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
    if isinstance(kind, type) and issubclass(kind, Record):
        return _decode_record(kind, data, where)
    return _decode_scalar(kind, data, where)


def _plain_numbers(kind: Any, data: list[Any]) -> bool:
    """Whether a list holds numbers of one kind and nothing else."""
    if kind is int:
        return all(type(item) is int and -INTEGER < item < INTEGER for item in data)
    return kind is float and all(type(item) is float for item in data)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _decode_record(kind: type[Record], data: Any, where: str) -> Record:
    if not isinstance(data, dict):
        raise PlanError(f"{where} must be an object, not {shortened(data)}.")
    known: Any = kind  # a type is hashable, which mypy does not see
    given, hints = data, _hints(known)
    data = _placed(where, lambda: kind.from_file(given))
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(data) - set(fields)):
        raise PlanError(f"{where} has an unknown field '{unknown[0]}'; known: {', '.join(fields)}.")
    for name, field in fields.items():
        optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if name not in data and not optional:
            raise PlanError(f"{where}.{name} is missing.")
    values = {name: _decode(hints[name], item, f"{where}.{name}") for name, item in data.items()}
    return _placed(where, lambda: kind(**values))


def _placed(where: str, make: Callable[[], T]) -> T:
    """What is made; an error begins with its place in the file."""
    try:
        return make()
    except HeadwiseError as error:
        raise type(error)(f"{where}: {error}") from None
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise PlanError(f"{where} holds values that do not fit together ({error}); run its stage again.") from None


def _decode_scalar(kind: Any, data: Any, where: str) -> Any:
    accepted = (int, float) if kind is float else kind
    if not isinstance(data, accepted) or (isinstance(data, bool) and kind is not bool):
        raise PlanError(f"{where} must be {kind.__name__}, not {shortened(data)}.")
    if isinstance(data, int) and abs(data) >= INTEGER:
        raise PlanError(f"{where} is a number of {len(hex(data)) - 2} hexadecimal digits; none is that large.")
    return kind(data)
