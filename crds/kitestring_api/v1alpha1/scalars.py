"""Strings, numbers and maps with a form of their own, shared by several resources."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StringConstraints, WithJsonSchema

Name = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
"""Name of a Kubernetes object (DNS subdomain)."""

Label = Annotated[str, StringConstraints(min_length=1, max_length=20, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")]
"""Name of a part of a run, short enough to stand in the names of pods (DNS label)."""

Key = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]
"""Key in a ConfigMap or Secret."""

ModelName = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[!-~]+$")]
"""Name by which an agent asks for a model: printable, without blanks."""

FieldName = Annotated[str, StringConstraints(min_length=1, max_length=128)]
"""Name of a field of a task row."""

Path = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
"""Path of a file or folder."""

Text = Annotated[str, StringConstraints(max_length=4096)]
"""Free text of moderate length: one argument, one pattern, an id."""

Token = Annotated[str, StringConstraints(min_length=1, max_length=256)]
"""A short word that Kitestring passes on without reading it: an id, a queue, a project."""

Url = Annotated[str, StringConstraints(min_length=8, max_length=2048, pattern=r"^https?://[^\s/]+(/\S*)?$")]
"""An http or https URL."""

Bucket = Annotated[str, StringConstraints(min_length=3, max_length=63, pattern=r"^[a-z0-9][-.a-z0-9]*[a-z0-9]$")]
"""Name of a bucket of object storage."""

ObjectKey = Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=r"^[^/\s]\S*$")]
"""Key of an object, or a prefix of keys: no leading slash, no blanks."""

QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i|[eE][0-9]+)?$"


def _text_of_integer(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Quantity = Annotated[
    str,
    StringConstraints(min_length=1, max_length=32, pattern=QUANTITY_PATTERN),
    BeforeValidator(_text_of_integer),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": QUANTITY_PATTERN,
            "x-kubernetes-int-or-string": True,
        }
    ),
]
"""A Kubernetes quantity such as 512Mi or 2G; an integer is read as its text."""

Scalar = Annotated[bool | int | float | str, WithJsonSchema({"x-kubernetes-preserve-unknown-fields": True})]
"""A single value of any plain type."""

JsonObject = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})]
"""An object of any shape, kept as it is."""

Seconds = Annotated[int, Field(ge=1, le=31_536_000)]
"""A duration in whole seconds, at most a year."""
