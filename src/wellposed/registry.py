"""Objects that may also be given by name."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from wellposed.errors import InputError, unknown_name

T = TypeVar("T")


@dataclass(frozen=True)
class Registry(Generic[T]):
    """Turns an object or a registered name into an object."""

    kind: str
    type: type
    factories: dict[str, Callable[[], T]] = field(default_factory=dict)

    def get(self, value: T | str) -> T:
        """Returns `value` itself, or what is registered under that name."""
        if isinstance(value, str):
            if value not in self.factories:
                raise unknown_name(self.kind, value, self.factories)
            return self.factories[value]()
        if not isinstance(value, self.type):
            raise InputError(
                f"a {self.kind} is an object of type {self.type.__name__} or one of the names "
                f"{', '.join(sorted(self.factories))}; received {value!r}"
            )
        return value

    def register(self, name: str, factory: Callable[[], T]) -> None:
        """Makes `name` available wherever this kind of object is accepted."""
        self.factories[name] = factory
