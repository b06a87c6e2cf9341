"""Sections and tables of a recipe: frozen, closed to unknown keys, and aware of which keys were read."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

CLOSED = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, ser_json_inf_nan="constants")
LONGEST = 1e7  # seconds that a setting may ask to wait: four months
Count = Annotated[int, Field(ge=1)]


class ConfigSection(BaseModel):
    """One section of a recipe: frozen, closed, and it notes which of its keys were read (law 12)."""

    model_config = CLOSED
    _read: set[str] = PrivateAttr(default_factory=set)

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name.startswith(("_", "model_")):
            return value
        read = (super().__getattribute__("__pydantic_private__") or {}).get(
            "_read"
        )  # self._read takes ten times as long
        if (read is None or name not in read) and name in type(self).model_fields:
            self._read.add(name)
        return value

    def unread_keys(self, prefix: str = "") -> list[str]:
        """Dotted names of keys that were set to other than their defaults, but that no part of the run looked at."""
        out = []
        for name in self.model_fields_set:
            value = self.__dict__.get(name)
            if isinstance(value, ConfigSection):
                out += value.unread_keys(f"{prefix}{name}.")
            elif name not in self._read and value != type(self).model_fields[name].get_default(
                call_default_factory=True
            ):
                out.append(f"{prefix}{name}")
        return sorted(out)

    def read_keys(self, prefix: str = "") -> list[str]:
        """Dotted names of the keys that were read: what a worker tells of its copy of the recipe."""
        out = [f"{prefix}{name}" for name in self._read]
        for name, value in self.__dict__.items():
            if isinstance(value, ConfigSection):
                out += value.read_keys(f"{prefix}{name}.")
        return out

    def mark_read(self, keys: Iterable[str]) -> None:
        """Count dotted names as read: by a worker, in its copy of the recipe."""
        for key in keys:
            name, _, rest = key.partition(".")
            inner = self.__dict__.get(name)
            self._read.add(name)
            if rest and isinstance(inner, ConfigSection):
                inner.mark_read([rest])

    def mark_everything_read(self) -> None:
        self._read.update(type(self).model_fields)
        for value in self.__dict__.values():
            if isinstance(value, ConfigSection):
                value.mark_everything_read()

    def to_values(self, without: Collection[str] = ()) -> dict[str, Any]:
        """The settings as plain data, for a reader that refuses the keys it does not know."""
        names = [name for name in type(self).model_fields if name not in without]
        self._read.update(names)
        return {name: value for name, value in self.model_dump().items() if name in names}


class SettingsTable(ConfigSection):
    """A key whose value is the table of one thing: `adapter = { kind = "lora", rank = 16 }`."""


class SettingsFault(ValueError):
    """A fault in a table whose settings depend on its kind: where the table stands, its model, and what pydantic found.

    `validation_messages.explain_settings` puts it into words.
    """

    def __init__(self, where: str, model: type[BaseModel], found: ValidationError) -> None:
        super().__init__(f"{where}: {found}")
        self.where, self.model, self.found = where, model, found


def split_kind(value: str | dict[str, Any], default: str) -> tuple[str, dict[str, Any]]:
    """ "tools" and { kind = "tools", turns = 2 } -> the kind, and the settings beside it."""
    if isinstance(value, str):
        return value, {}
    settings = {name: setting for name, setting in value.items() if name != "kind"}
    return value.get("kind", default), settings


def read_settings(where: str, model: type[BaseModel], settings: dict[str, Any]) -> Any:
    """The settings of one table as its model, or SettingsFault."""
    try:
        return model.model_validate(settings)
    except ValidationError as error:
        raise SettingsFault(where, model, error) from error
