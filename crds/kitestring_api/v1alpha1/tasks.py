"""The data: tasks to train on, tasks to validate on, and which of their fields the agent never sees."""

from typing import Literal

from pydantic import Field

from kitestring_api.v1alpha1.api_model import ApiModel
from kitestring_api.v1alpha1.references import BucketObject, KeyReference, VolumePath
from kitestring_api.v1alpha1.rule import Rule
from kitestring_api.v1alpha1.scalars import FieldName, JsonObject, Path


class TaskSource(ApiModel):
    """Where rows of tasks are: one JSON object per line (jsonl), or one row per task (parquet)."""

    rules = (
        Rule(
            "[has(self.path), has(self.inline), has(self.configMap), has(self.s3), has(self.pvc)]"
            ".exists_one(given, given)",
            "spec.tasks.train and spec.tasks.validation need exactly one of path, inline, configMap, s3 and pvc",
            "keep the one that says where the tasks are",
        ),
        Rule(
            "!has(self.format) || !has(self.inline)",
            "spec.tasks.*.format has no meaning with inline",
            "remove format",
            field=".format",
            reason="FieldValueForbidden",
        ),
        Rule(
            "!has(self.format) || self.format != 'parquet' || !has(self.configMap)",
            "spec.tasks.*.format must be jsonl with configMap",
            "remove format, or use s3 or pvc for a Parquet file",
            field=".format",
        ),
    )

    path: Path | None = Field(
        None, description="File: on this machine in a local run, in the trainer's image or a volume in a cluster."
    )
    inline: list[JsonObject] | None = Field(None, min_length=1, max_length=1000, description="The rows themselves.")
    config_map: KeyReference | None = Field(None, description="Key of a ConfigMap that holds JSON lines.")
    s3: BucketObject | None = Field(None, description="Object in object storage.")
    pvc: VolumePath | None = Field(None, description="File on a volume.")
    format: Literal["jsonl", "parquet"] | None = Field(
        None, description="Format of the file; absent: by its suffix, .jsonl or .parquet."
    )
    limit: int | None = Field(None, ge=1, le=100_000_000, description="Use the first so many rows; absent: all.")


class Tasks(ApiModel):
    """The tasks of a run."""

    rules = (
        Rule(
            "!has(self.visibleFields) || self.visibleFields.all(field, !(field in self.hiddenFields))",
            "spec.tasks.visibleFields and spec.tasks.hiddenFields must not name the same field",
            "remove it from one of them",
            field=".visibleFields",
        ),
    )

    train: TaskSource = Field(description="Tasks to train on, drawn in an order made from the seed.")
    validation: TaskSource | None = Field(None, description="Tasks to validate on, all of them each time.")
    hidden_fields: list[FieldName] = Field(
        default_factory=list,
        max_length=64,
        description="Fields that only the scorer sees: they never reach the agent, nor its pod.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    visible_fields: list[FieldName] | None = Field(
        None,
        max_length=64,
        description="Fields that the agent sees; absent: all but the hidden ones.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
