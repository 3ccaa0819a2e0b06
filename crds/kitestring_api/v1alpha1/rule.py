"""A cross-field rule: CEL that the API server evaluates, and that is evaluated offline by the same text."""

from dataclasses import dataclass
from typing import Literal

Reason = Literal["FieldValueInvalid", "FieldValueForbidden", "FieldValueRequired"]
"""Of those that Kubernetes knows, not FieldValueDuplicate: with it the API server leaves our message out."""


@dataclass(frozen=True)
class Rule:
    """One entry of `x-kubernetes-validations`.

    `cel` is true when the object (`self`; with `oldSelf`, the change) is right. `requires` says what must hold and
    names the field by its full path; `remedy` says what to do; `field` is the offending field relative to the object
    the rule is attached to ("" for the object itself), in the notation of Kubernetes' `fieldPath` (".builtin").
    """

    cel: str
    requires: str
    remedy: str
    field: str = ""
    reason: Reason = "FieldValueInvalid"

    @property
    def message(self) -> str:
        """The one line that the API server answers with."""
        return f"{self.requires}; {self.remedy}"

    @property
    def is_transition(self) -> bool:
        """Whether the rule is about a change: it is evaluated on updates only."""
        return "oldSelf" in self.cel
