"""YAML as a cluster reads it: several documents in a file, no key twice, every value with its line.

PyYAML differs from kubectl's reader in a few scalars (1e-3 is text to it, 1:30 a number, 2026-01-01 a date); here they
are read as kubectl reads them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from kitestring_cli.problem import FieldPath

_MERGE_TAG = "tag:yaml.org,2002:merge"


class YamlError(Exception):
    """A text that is no YAML, or no YAML that a cluster takes. `line` counts from 1 where it is known."""

    def __init__(self, message: str, line: int | None) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class YamlDocument:
    """One document: plain data, and the line of each field and item by its path. `index` counts from 1."""

    index: int
    data: Any
    lines: dict[FieldPath, int] = field(repr=False)

    def line(self, path: FieldPath) -> int | None:
        """Line of what is at `path`, or of the nearest thing around it that is in the text."""
        for length in range(len(path), -1, -1):
            if (line := self.lines.get(path[:length])) is not None:
                return line
        return None


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with kubectl's idea of scalars."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag.rpartition(":")[2] not in {"timestamp", "float", "int", "value"}
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^[-+]?(0b[0-1_]+|0o?[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$"),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"),
    list("-+.0123456789"),
)


def read_documents(text: str) -> Iterator[YamlDocument]:
    """The documents of `text`, empty ones left out but counted.

    Raises YamlError where the text is no YAML, a key comes twice, or a key is no text.
    """
    index = 0
    try:
        loader = _Loader(text)
        while loader.check_node():
            index += 1
            node = loader.get_node()
            if node is None or _is_empty(node):
                continue
            lines: dict[FieldPath, int] = {}
            _index(node, (), lines, set())
            yield YamlDocument(index, loader.construct_document(node), lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(part for part in (error.context, error.problem) if part)
        raise YamlError(what or "cannot be read", mark.line + 1 if mark else None) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(f"the character {error.character!r} is not allowed", line) from error
    except ValueError as error:
        # a scalar with an explicit tag that does not fit, such as !!int x
        raise YamlError(str(error), None) from error
    except RecursionError as error:
        raise YamlError("nested too deeply", None) from error


def parse_scalar(text: str) -> Any:
    """A value on a command line, typed as YAML types it: 3, 1e-3, true, null, [a, b], text.

    Raises YamlError where it is no YAML.
    """
    documents = list(read_documents(text))
    if len(documents) > 1:
        raise YamlError("several documents", None)
    return documents[0].data if documents else None


def _is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null" and node.value == ""


def _index(node: yaml.Node, path: FieldPath, lines: dict[FieldPath, int], above: set[int]) -> None:
    """Fill in the line of `node` and of all in it; refuse doubled keys, keys that are no text, and cycles."""
    lines.setdefault(path, node.start_mark.line + 1)
    if id(node) in above:
        raise YamlError("an alias refers to what it stands in", node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.tag == _MERGE_TAG:
                continue
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                shown = key.value if isinstance(key, yaml.ScalarNode) else "a list or object"
                raise YamlError(f"the key {shown} is no text: write it in quotes", line)
            if key.value in seen:
                raise YamlError(f"the key {key.value} comes twice in the same object: remove one", line)
            seen.add(key.value)
            lines[(*path, key.value)] = line
            _index(value, (*path, key.value), lines, above | {id(node)})
    elif isinstance(node, yaml.SequenceNode):
        for position, item in enumerate(node.value):
            _index(item, (*path, position), lines, above | {id(node)})
