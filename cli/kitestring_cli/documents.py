"""Files of a user as typed documents: what `kubectl apply` takes, with `--set` laid over it.

`load(paths, overrides)` never raises for what a user can mend: mistakes come back as problems beside whatever could be
read. Rules across fields and documents are the matter of `validate`.
"""

import base64
import binascii
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kitestring_api import names
from kitestring_api.v1alpha1 import RolloutPool, TrainingRun
from kitestring_cli.override import Override, OverrideError, apply, parse_override
from kitestring_cli.problem import FieldPath, Problem, value_text
from kitestring_cli.schema_problems import schema_problems
from kitestring_cli.yaml_text import YamlDocument, YamlError, read_documents

_MODELS: dict[str, type[TrainingRun] | type[RolloutPool]] = {
    names.KIND_TRAINING_RUN: TrainingRun,
    names.KIND_ROLLOUT_POOL: RolloutPool,
}
_KEY_VALUES = ("ConfigMap", "Secret")


@dataclass(frozen=True)
class KeyValues:
    """A ConfigMap or Secret: values by key, decoded. Never put into a log whole: a Secret is one."""

    name: str
    values: dict[str, bytes]

    def __repr__(self) -> str:
        return f"KeyValues(name={self.name!r}, keys={sorted(self.values)})"


@dataclass(frozen=True)
class LoadedDocument:
    """One document of a file: `index` counts from 1 in its file; `raw` is plain data, overrides applied.

    `model` is the typed document: None where it has problems, or is of a kind that means nothing to Kitestring.
    """

    file: str
    index: int
    kind: str
    name: str
    raw: dict[str, Any]
    model: TrainingRun | RolloutPool | KeyValues | None
    text: YamlDocument

    def problem(self, path: FieldPath, what: str, **details: Any) -> Problem:
        """A problem in this document, with its place filled in. `details` are fields of Problem."""
        return Problem(
            file=self.file,
            document=self.index,
            kind=self.kind,
            name=self.name,
            line=self.text.line(path),
            path=path,
            what=what,
            **details,
        )


@dataclass(frozen=True)
class Documents:
    """All documents of some files, in order, and what was wrong with reading them."""

    documents: tuple[LoadedDocument, ...]
    problems: tuple[Problem, ...]

    @property
    def runs(self) -> tuple[TrainingRun, ...]:
        """The runs that could be read."""
        return tuple(found.model for found in self.documents if isinstance(found.model, TrainingRun))

    @property
    def pools(self) -> tuple[RolloutPool, ...]:
        """The pools that could be read."""
        return tuple(found.model for found in self.documents if isinstance(found.model, RolloutPool))

    def pool(self, name: str) -> RolloutPool | None:
        """The pool of that name."""
        return next((pool for pool in self.pools if pool.metadata.name == name), None)

    def config_map(self, name: str) -> KeyValues | None:
        """The ConfigMap of that name."""
        return self._key_values("ConfigMap", name)

    def secret(self, name: str) -> KeyValues | None:
        """The Secret of that name."""
        return self._key_values("Secret", name)

    def _key_values(self, kind: str, name: str) -> KeyValues | None:
        for found in self.documents:
            if found.kind == kind and isinstance(found.model, KeyValues) and found.name == name:
                return found.model
        return None


def load(paths: Sequence[str], overrides: Sequence[str] = ()) -> Documents:
    """Read files ("-": standard input), lay `--set` arguments over them, and make typed documents of them."""
    problems: list[Problem] = []
    texts: list[tuple[str, YamlDocument]] = []
    for path in paths:
        shown = "<stdin>" if path == "-" else path
        try:
            found = [(shown, document) for document in read_documents(_text(path))]
        except YamlError as error:
            problems.append(Problem(shown, f"no valid YAML: {error}", line=error.line))
        except OSError as error:
            reason = error.strerror or str(error)
            problems.append(Problem(shown, f"cannot be read: {reason}", remedy="give the path of a YAML file"))
        except UnicodeDecodeError:
            problems.append(
                Problem(shown, "is no text", allowed="YAML in UTF-8", remedy="give the path of a YAML file")
            )
        else:
            if not found:
                problems.append(
                    Problem(shown, "holds no document", remedy="write a TrainingRun and a RolloutPool into it")
                )
            texts.extend(found)
    parsed: list[Override] = []
    for argument in overrides:
        try:
            parsed.append(parse_override(argument))
        except OverrideError as error:
            problems.append(Problem(f"--set {argument}", str(error), remedy=error.remedy))
    objects = [(document.data, document) for _, document in texts if isinstance(document.data, dict)]
    for override in parsed:
        try:
            apply(override, [data for data, _ in objects])
        except OverrideError as error:
            problems.append(Problem(f"--set {override.argument}", str(error), remedy=error.remedy))
    documents: list[LoadedDocument] = []
    for file, text in texts:
        loaded, found_problems = _document(file, text)
        problems.extend(found_problems)
        if loaded is not None:
            documents.append(loaded)
    problems.extend(_doubled(documents))
    return Documents(tuple(documents), tuple(problems))


def _text(path: str) -> str:
    return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")


def _document(file: str, text: YamlDocument) -> tuple[LoadedDocument | None, list[Problem]]:
    """The typed document, or None where it is not even an object; and its problems."""
    data = text.data
    if not isinstance(data, dict):
        return None, [
            Problem(
                file,
                "is no resource",
                document=text.index,
                line=text.line(()),
                found=value_text(data),
                allowed="an object with apiVersion, kind, metadata and spec",
                remedy="write one resource per document, with --- between them",
            )
        ]
    kind = data.get("kind")
    metadata = data.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    untyped = LoadedDocument(file, text.index, str(kind or ""), name if isinstance(name, str) else "", data, None, text)
    if not isinstance(kind, str):
        what = "missing" if kind is None else "wrong type"
        return untyped, [untyped.problem(("kind",), what, allowed=_kinds(), remedy="say what the document is")]
    if kind in _MODELS:
        return _resource(untyped, _MODELS[kind])
    if kind in _KEY_VALUES:
        return _key_values(untyped)
    return untyped, [_unknown_kind(untyped)]


def _unknown_kind(document: LoadedDocument) -> Problem:
    """A mistake where one of our kinds was probably meant, else a note that the document is ignored."""
    group = str(document.raw.get("apiVersion", "")).partition("/")[0]
    known = {kind.casefold() for kind in (*_MODELS, *_KEY_VALUES)}
    if group == names.GROUP or document.kind.casefold() in known:
        remedy = "correct the kind; upper and lower case matter"
        return document.problem(("kind",), "unknown kind", found=document.kind, allowed=_kinds(), remedy=remedy)
    return document.problem(
        ("kind",), "ignored: Kitestring does nothing with this kind", found=document.kind, severity="note"
    )


def _kinds() -> str:
    return ", ".join((*_MODELS, *_KEY_VALUES))


def _resource(
    untyped: LoadedDocument, model: type[TrainingRun] | type[RolloutPool]
) -> tuple[LoadedDocument, list[Problem]]:
    try:
        typed = model.from_manifest(untyped.raw)
    except ValidationError as error:
        return untyped, schema_problems(untyped.problem, model, error)
    return _with_model(untyped, typed), []


def _key_values(untyped: LoadedDocument) -> tuple[LoadedDocument, list[Problem]]:
    """A ConfigMap or Secret. No value is ever shown, not even a wrong one."""
    if not untyped.name:
        return untyped, [
            untyped.problem(("metadata", "name"), "missing", allowed="text", remedy="give the document a name")
        ]
    values: dict[str, bytes] = {}
    problems: list[Problem] = []
    encoded_fields = ("data",) if untyped.kind == "Secret" else ("binaryData",)
    plain_fields = ("stringData",) if untyped.kind == "Secret" else ("data",)
    for field in (*encoded_fields, *plain_fields):
        entries = untyped.raw.get(field)
        if entries is None:
            continue
        if not isinstance(entries, dict):
            problems.append(untyped.problem((field,), "wrong type", allowed="map of keys to text"))
            continue
        for key, value in entries.items():
            path = (field, key)
            if not isinstance(value, str):
                problems.append(untyped.problem(path, "wrong type", allowed="text", remedy="put the value in quotes"))
            elif field in encoded_fields:
                try:
                    values[key] = base64.b64decode("".join(value.split()), validate=True)
                except binascii.Error:
                    remedy = "encode it with base64" + (", or use stringData" if untyped.kind == "Secret" else "")
                    problems.append(untyped.problem(path, "is no base64", allowed="text in base64", remedy=remedy))
            else:
                values[key] = value.encode()
    if problems:
        return untyped, problems
    return _with_model(untyped, KeyValues(untyped.name, values)), []


def _with_model(untyped: LoadedDocument, model: TrainingRun | RolloutPool | KeyValues) -> LoadedDocument:
    return LoadedDocument(untyped.file, untyped.index, untyped.kind, untyped.name, untyped.raw, model, untyped.text)


def _doubled(documents: Sequence[LoadedDocument]) -> list[Problem]:
    """A problem for each document whose kind and name an earlier one has: the cluster would keep the last only."""
    first: dict[tuple[str, str], LoadedDocument] = {}
    problems = []
    for document in documents:
        if document.model is None:
            continue
        earlier = first.setdefault((document.kind, document.name), document)
        if earlier is not document:
            problems.append(
                document.problem(
                    ("metadata", "name"),
                    f"an earlier document has this kind and name: {earlier.file}, document {earlier.index}",
                    found=document.name,
                    remedy="rename or remove one of them",
                )
            )
    return problems
