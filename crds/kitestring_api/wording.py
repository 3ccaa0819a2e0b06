"""A schema in words: what a field may hold, as error messages and the reference say it."""

from collections.abc import Callable, Sequence

from kitestring_api.structural_schema import Schema

_UNBOUNDED_TEXT = 1024
"""Lengths from here on keep storage sane, they do not guide a reader."""


def allowed(schema: Schema) -> str:
    """What `schema` allows, as a phrase without an article: "integer from 1 to 256", "one of ppo, cispo, gspo"."""
    if schema.get("x-kubernetes-int-or-string"):
        return "quantity such as 512Mi or 2G"
    if "enum" in schema:
        values = schema["enum"]
        return str(values[0]) if len(values) == 1 else f"one of {', '.join(map(str, values))}"
    return _BY_TYPE[schema.get("type")](schema)


def _object(schema: Schema) -> str:
    if "properties" in schema:
        return f"object with {_series(list(schema['properties']))}"
    if "additionalProperties" in schema:
        at_most = f", at most {schema['maxProperties']}" if "maxProperties" in schema else ""
        return f"map of names to {allowed(schema['additionalProperties'])}{at_most}"
    return "object of any shape"


def _list(schema: Schema) -> str:
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    if least == most:
        count = f"{least} items"
    elif least:
        count = f"{least} to {most} items" if most else f"at least {least} items"
    else:
        count = f"at most {most} items" if most else "items"
    distinct = ", no two alike" if schema.get("x-kubernetes-list-type") == "set" else ""
    keys = schema.get("x-kubernetes-list-map-keys")
    named = f", each with a {' and '.join(keys)} of its own" if keys else ""
    item = schema["items"]
    each = "object" if item.get("type") == "object" else allowed(item)
    return f"list of {count}{distinct}{named}; each: {each}"


def _text(schema: Schema) -> str:
    if schema.get("format") == "date-time":
        return "date and time (RFC 3339)"
    parts = ["text"]
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if most is not None and most < _UNBOUNDED_TEXT:
        parts.append(f"of {least} to {most} characters" if least else f"of at most {most} characters")
    elif least:
        parts.append("that is not empty")
    if "pattern" in schema:
        parts.append(f"matching {schema['pattern']}")
    return " ".join(parts)


def _bounds(schema: Schema) -> str:
    least, most = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if least is not None and most is not None and not above and not below:
        return f" from {least} to {most}"
    words = []
    if least is not None:
        words.append(f"greater than {least}" if above else f"at least {least}")
    if most is not None:
        words.append(f"less than {most}" if below else f"at most {most}")
    return f" {', '.join(words)}" if words else ""


def _series(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


_BY_TYPE: dict[str | None, Callable[[Schema], str]] = {
    "integer": lambda schema: f"integer{_bounds(schema)}",
    "number": lambda schema: f"number{_bounds(schema)}",
    "boolean": lambda _: "true or false",
    "string": _text,
    "array": _list,
    "object": _object,
    None: lambda _: "single value (text, number, true or false)",
}
