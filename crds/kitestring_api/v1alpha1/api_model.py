"""What every object of the API has in common: camelCase names, no unknown fields, no silent conversion, rules."""

from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.alias_generators import to_camel

from kitestring_api.v1alpha1.rule import Rule


class ApiModel(BaseModel):
    """An object of the API: camelCase in YAML, snake_case in Python, unknown fields and wrong types refused, read-only.

    Cross-field rules are not Python code: `rules` holds them as CEL, the very text that the cluster evaluates.
    Construct one from a parsed file with `Model.from_manifest(data)`, turn it back with `manifest()`.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
    )
    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        """`field: null` is the same as no field, as a cluster reads it. Only fields that we know are looked at."""
        if not isinstance(data, dict):
            return data
        known = {str(field.alias) for field in cls.model_fields.values()}
        return {name: value for name, value in data.items() if value is not None or name not in known}

    @classmethod
    def from_manifest(cls, data: object) -> Self:
        """The typed object that parsed YAML holds. Raises pydantic's ValidationError.

        Unlike `model_validate`, it takes the names of YAML only: `group_size` is an unknown field in a file.
        """
        return cls.model_validate(data, by_alias=True, by_name=False)

    def manifest(self) -> dict[str, object]:
        """This object as it would stand in YAML: plain data, camelCase, defaults filled in, absent fields left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class OpenModel(ApiModel):
    """A part of a Kubernetes object of which only some fields concern us: the others pass through unchanged."""

    model_config = ConfigDict(extra="allow")
