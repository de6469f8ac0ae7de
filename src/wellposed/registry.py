"""Objects that may also be given by name."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from wellposed.errors import InputError, unknown_name

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Registry(Generic[T]):
    """Objects by name: ``registry[name]``, or `get` where an object is accepted as well.

    Example:
        >>> registry = Registry("number", int, {"one": lambda: 1, "two": lambda: 2})
        >>> registry["one"], registry.get(7), list(registry)
        (1, 7, ['one', 'two'])
        >>> registry["tow"]
        Traceback (most recent call last):
            ...
        wellposed.errors.UnknownNameError: unknown number 'tow'; valid: one, two; did you mean 'two'?
    """

    kind: str
    type: Any
    factories: dict[str, Callable[[], T]] = field(default_factory=dict)

    @classmethod
    def of(cls, kind: str, type: Any, objects: Mapping[str, T]) -> "Registry[T]":
        """Builds a registry of objects that are always the same ones."""
        return cls(kind, type, {name: partial(objects.__getitem__, name) for name in objects})

    def get(self, value: T | str) -> T:
        """Returns `value` itself, or what is registered under that name."""
        if isinstance(value, str):
            return self[value]
        if not isinstance(value, self.type):
            raise InputError(
                f"a {self.kind} is an object of type {self.type.__name__} or one of the names "
                f"{', '.join(sorted(self.factories))}; received {value!r}"
            )
        return value

    def __getitem__(self, name: str) -> T:
        if name not in self.factories:
            raise unknown_name(self.kind, name, self.factories)
        return self.factories[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.factories)

    def __len__(self) -> int:
        return len(self.factories)

    def __contains__(self, name: object) -> bool:
        return name in self.factories

    def register(self, name: str, factory: Callable[[], T]) -> None:
        """Makes `name` available wherever this kind of object is accepted."""
        self.factories[name] = factory
