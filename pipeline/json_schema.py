"""The JSON Schemas of the two public formats, from the models themselves."""

from typing import Any

from pydantic import TypeAdapter

from schemas.document import DocumentMessage, DocumentResult

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def message_schema() -> dict[str, Any]:
    """Of a message on the input topic. Unknown keys are refused, there and in `sampling`."""
    return {"$schema": _DIALECT, **DocumentMessage.model_json_schema()}


def row_schema() -> dict[str, Any]:
    """Of a row in the results index."""
    schema = TypeAdapter(DocumentResult).json_schema(mode="serialization")
    return {"$schema": _DIALECT, **schema, "title": "Pagemill result"}
