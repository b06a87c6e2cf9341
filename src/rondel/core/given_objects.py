"""What a recipe was given as an object of Python, and the name that stands for it there: "__main__:grade" for a
function of a notebook.

`name_objects` puts names in the place of objects; `rondel.core.registry` finds them by these names, in this process
and in its workers, to which they travel pickled by value (`pack_given`, `unpack_given`). A process that was never
given them has a name that leads nowhere, and says so.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

from rondel.core.errors import ConfigError
from rondel.core.registry import GIVEN, MAIN, Untravelled, can_be_imported
from rondel.core.types import unwrap_scalar

CALLED = ("task.env", "task.reward", "task.filters")  # keys at which a name, a class or a function stands


class GivenRows:
    """A source of tasks: rows that were given as they are, each a dict; or several lists of them by name, as a
    DatasetDict has them, of which the settings `split` and `eval_split` name one.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]] | Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
        parts = rows.items() if isinstance(rows, Mapping) else [("train", rows)]
        self.rows = {str(name): [dict(row) for row in part] for name, part in parts}

    def __call__(self, split: str = "train") -> list[dict[str, Any]]:
        if split not in self.rows:
            raise ConfigError(f"task.data.split = '{split}'; the rows that were given are {', '.join(self.rows)}")
        return self.rows[split]


def name_objects(tree: Any, at: str = "") -> Any:
    """The same settings with a name wherever a function, a class or another object that can be called stood, and where
    task.data is a list of rows. -> dicts, lists and plain values.
    """
    source = at.startswith("task.data.") and at.endswith(".kind")
    if isinstance(tree, Mapping) and not source:
        return {key: name_objects(value, f"{at}.{key}" if at else str(key)) for key, value in tree.items()}
    tree = unwrap_scalar(tree)
    plain = tree is None or isinstance(tree, str | int | float)
    if (source or at == "task.data") and not plain and not callable(tree):
        name = _remember(_rows(tree, at), at)
        return name if source else {"kind": name}
    if isinstance(tree, (list, tuple)):
        return [name_objects(value, at) for value in tree]
    if isinstance(tree, str) and tree.startswith(f"{MAIN}:"):
        found = getattr(sys.modules[MAIN], tree.partition(":")[2], None)
        return tree if found is None else _remember(found, at, tree)
    if not callable(tree) and not plain and at.removesuffix(".kind") in CALLED:
        raise ConfigError(
            f"{at} is an object of {type(tree).__name__}, which cannot be called: give the class or a function itself, "
            f"and settings of a class beside it, as in {at.removesuffix('.kind')} = "
            f"{{'kind': {type(tree).__name__}, ...}}"
        )
    return _remember(tree, at) if callable(tree) else tree


def _rows(rows: Any, at: str) -> GivenRows:
    try:
        if hasattr(rows, "to_dict") and hasattr(rows, "notna"):  # a DataFrame of pandas, where NaN is what is missing
            rows = rows.astype(object).where(rows.notna(), None).to_dict("records")
        return GivenRows(rows)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{at}: rows are dicts, as in [{{'prompt': '2 + 2 =', 'answer': '4'}}]: {error}") from error


def _remember(found: Any, at: str, name: str = "") -> str:
    """-> its name."""
    name = name or _name_of(found, at)
    module, _, attribute = name.partition(":")
    if can_be_imported(name) and getattr(sys.modules.get(module), attribute, None) is found:
        return name
    GIVEN[name] = found
    return name


def _name_of(found: Any, at: str) -> str:
    if isinstance(found, GivenRows):
        try:
            content = pickle.dumps(found.rows)
        except Exception as error:  # pickle raises what an object's own code raises
            raise ConfigError(f"{at}: its rows cannot be stored: {error}") from error
        return f"{MAIN}:rows({blake2b(content, digest_size=4).hexdigest()})"  # other rows are another recipe
    if hasattr(found, "__qualname__"):
        name = f"{found.__module__}:{found.__qualname__}"
    else:
        name = f"{MAIN}:{type(found).__qualname__}()"
    return f"{name}({at})" if "<" in name or "(" in name else name  # two lambdas of one recipe are two


def pack_given() -> bytes:
    """All of them for a worker; nothing where nothing was given. What cannot be pickled is only an error where a worker
    looks for it: an environment or a filter never leaves this process.
    """
    if not GIVEN:
        return b""
    import cloudpickle

    packed: dict[str, bytes | str] = {}
    for name, found in GIVEN.items():
        if isinstance(found, GivenRows):
            continue  # tasks are read once, by who was given them
        try:
            packed[name] = cloudpickle.dumps(found)
        except Exception as error:
            packed[name] = (
                f"'{name}' cannot be sent to the process that calls it ({type(error).__name__}: {error}): what it "
                "holds, a lock or a connection say, should be made when it is called first"
            )
    return pickle.dumps(packed)


def unpack_given(packed: bytes) -> None:
    """In a worker, from its parent."""
    for name, found in pickle.loads(packed).items() if packed else ():
        GIVEN[name] = Untravelled(found) if isinstance(found, str) else pickle.loads(found)
