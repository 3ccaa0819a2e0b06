"""From the models to a Kubernetes structural schema: OpenAPI v3 without references, alternatives or null.

Kubernetes prunes and defaults by a structural schema, so that every node must have a type of its own
(https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#specifying-a-structural-schema).
"""

from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kitestring_api.v1alpha1.api_model import ApiModel, OpenModel

Schema = dict[str, Any]

_DROPPED = frozenset({"title", "additionalProperties", "patternProperties", "propertyNames", "$defs"})
"""Keywords of pydantic's schema that a structural schema must not have, or has no need of. `additionalProperties` comes
back for maps."""


def structural_schema(model: type[ApiModel], *, defaults: bool = True) -> Schema:
    """The structural schema of `model`, nested models in place, with its CEL rules.

    `defaults=False` leaves defaults out: a status has none, its writer says everything.
    """
    generated = model.model_json_schema(by_alias=True)
    return _object(model, generated, generated.get("$defs", {}), defaults)


def _object(model: type[ApiModel], node: Schema, definitions: dict[str, Schema], defaults: bool) -> Schema:
    """The schema of one model; `node` is pydantic's schema of it, `definitions` all that it refers to."""
    properties: dict[str, Schema] = {}
    for field in model.model_fields.values():
        alias = str(field.alias)
        properties[alias] = _field(field, node["properties"][alias], definitions, defaults)
    schema: Schema = {"type": "object", "description": _first_paragraph(model), "properties": properties}
    if required := node.get("required"):
        schema["required"] = list(required)
    if issubclass(model, OpenModel):
        schema["x-kubernetes-preserve-unknown-fields"] = True
    if model.rules:
        schema["x-kubernetes-validations"] = [
            {"rule": rule.cel, "message": rule.message, "reason": rule.reason}
            | ({"fieldPath": rule.field} if rule.field else {})
            for rule in model.rules
        ]
    return schema


def _field(field: FieldInfo, node: Schema, definitions: dict[str, Schema], defaults: bool) -> Schema:
    schema = _value(node, definitions, defaults, _nested_model(field.annotation))
    if field.description:
        schema["description"] = field.description
    schema.pop("default", None)
    if defaults and not field.is_required():
        default = field.get_default(call_default_factory=True, validated_data={})
        if default is not None:
            # in full: a cluster tests rules against the default as it stands, before it fills in defaults within
            schema["default"] = default.manifest() if isinstance(default, ApiModel) else default
    return schema


def _value(node: Schema, definitions: dict[str, Schema], defaults: bool, model: type[ApiModel] | None) -> Schema:
    """The schema of a value. `model` is the model that it, or each of its items, is made of, if any."""
    if "$ref" in node:
        target = definitions[node["$ref"].rpartition("/")[2]]
        if model is not None and "properties" in target:
            return _object(model, target, definitions, defaults)
        return _value(target, definitions, defaults, model) | _plain(node)
    if "anyOf" in node and not node.get("x-kubernetes-int-or-string"):
        present = [choice for choice in node["anyOf"] if choice.get("type") != "null"]
        if len(present) != 1:
            raise TypeError(f"a structural schema has no alternatives: {node}")
        return _value(present[0], definitions, defaults, model) | _plain(node)
    schema = _plain(node)
    if "const" in schema:
        schema["enum"] = [schema.pop("const")]
    if "items" in node:
        schema["items"] = _value(node["items"], definitions, defaults, model)
    # keys with a pattern of their own cannot be said; that the values have a schema can
    values = [node.get("additionalProperties"), *node.get("patternProperties", {}).values()]
    if of_values := [value for value in values if isinstance(value, dict)]:
        schema["additionalProperties"] = _value(of_values[0], definitions, defaults, model)
    for bound in ("Minimum", "Maximum"):
        exclusive = schema.pop(f"exclusive{bound}", None)
        if exclusive is not None:
            schema[bound.lower()] = exclusive
            schema[f"exclusive{bound}"] = True
    if schema.get("type") == "integer":
        schema["format"] = "int64"
    return schema


def _plain(node: Schema) -> Schema:
    """The keywords of `node` that hold no schema, except those that a structural schema must not have."""
    return {key: value for key, value in node.items() if key not in _DROPPED | {"$ref", "anyOf", "items"}} | (
        {"anyOf": node["anyOf"]} if node.get("x-kubernetes-int-or-string") else {}
    )


def _nested_model(annotation: Any) -> type[ApiModel] | None:
    """The model in `annotation`: itself, or what an optional, list or dict of it holds."""
    if isinstance(annotation, type) and issubclass(annotation, ApiModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        if (model := _nested_model(argument)) is not None:
            return model
    return None


def _first_paragraph(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split("\n\n")[0].split())
