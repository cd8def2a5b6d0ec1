"""A task: what is asked of the model about each document. The operator writes it, in the settings."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from schemas.inference import SamplingParams


class Task(BaseModel):
    """One entry of `[tasks]` in the settings. Its name is its key there: letters, digits, `.`, `_`, `-`; no colon."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["generate", "classify"] = Field("generate", description="classify answers with one of `labels`")
    system: str | None = Field(None, description="the system message")
    template: str | None = Field(None, description="Jinja; sees the document's `fields`; renders the user's message")
    chat: bool = Field(True, description="false: the text as it is, without the model's chat template")
    sampling: SamplingParams = Field(default_factory=SamplingParams)
    output_schema: dict[str, Any] | None = Field(None, description="JSON Schema that the output must satisfy")
    labels: tuple[str, ...] = Field((), description="classify: the answers, one of which is given")
    overflow: Literal["fail", "truncate_middle"] = Field("fail", description="where the prompt exceeds the context")
    index: str | None = Field(None, description="alias to write to; the default of the settings where absent")

    @model_validator(mode="after")
    def _labels_go_with_classify(self) -> "Task":
        if self.kind == "classify":
            if len(self.labels) < 2:
                raise ValueError(f"a classify task needs at least two labels, not {list(self.labels)!r}")
            if len(set(self.labels)) != len(self.labels) or not all(label.strip() for label in self.labels):
                raise ValueError(f"labels must be distinct and not blank: {list(self.labels)!r}")
            if (inside := stop_inside_label(self.sampling.stop, self.labels)) is not None:
                raise ValueError(f"sampling.{inside}")
            if self.output_schema is not None:
                raise ValueError("a classify task has labels, not an output_schema")
        elif self.labels:
            raise ValueError(f'labels go with kind = "classify", not {self.kind!r}')
        return self


def stop_inside_label(stop: Sequence[str], labels: Sequence[str]) -> str | None:
    """Says which stop string would end which label before it is spelled; None where none would."""
    for text in stop:
        for label in labels:
            if text in label:
                return (
                    f"stop holds {text!r}, which is in the label {label!r}: the answer would end there and be no label"
                )
    return None
