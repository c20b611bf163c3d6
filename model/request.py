"""A request as the user means it: validated, frozen. Every fault names the input and says its limit."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from model.errors import RequestError

_NOUNS = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
}


class Request(BaseModel):
    """The inputs of one prediction, with the limits that predict.py shows to clients.

    Build it with ``Request.of(...)``, which raises RequestError rather than pydantic's ValidationError.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    prompt: str = Field(min_length=1, max_length=2000000)
    system_prompt: str | None = Field(default=None, max_length=2000000)
    chat: bool = False
    max_tokens: int = Field(default=256, ge=1, le=65536)
    temperature: float = Field(default=1.0, ge=0.0, le=5.0)
    top_p: float = Field(default=0.5, ge=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0, le=65536)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    penalty_decay: float = Field(default=0.996, ge=0.0, le=1.0)
    stop: list[Annotated[str, Field(min_length=1, max_length=1000)]] = Field(default=[], max_length=64)
    seed: int | None = Field(default=None, ge=0, le=9007199254740991)
    session: str | None = Field(default=None, min_length=1, max_length=256)

    @field_validator("max_tokens", "top_k", "seed", mode="before")
    @classmethod
    def _whole(cls, value: Any) -> Any:
        """JSON makes no difference between 5 and 5.0, and Cog lets both pass for an integer."""
        return int(value) if isinstance(value, float) and value.is_integer() else value

    @model_validator(mode="after")
    def _system_prompt_needs_chat(self) -> "Request":
        if self.system_prompt is not None and not self.chat:
            raise PydanticCustomError(
                "conflict", "is only used with chat=true; set chat=true or leave system_prompt out"
            )
        return self

    @classmethod
    def of(cls, **inputs: Any) -> "Request":
        """Validate the inputs. Raises RequestError for the first one that is at fault."""
        try:
            return cls(**inputs)
        except ValidationError as error:
            raise _explain(error.errors()[0]) from None


def _explain(detail: ErrorDetails) -> RequestError:
    if detail["type"] == "conflict":
        return RequestError("system_prompt", detail["msg"])
    field, *item = map(str, detail["loc"])
    if field not in Request.model_fields:
        return RequestError(field, f"there is no such input; the inputs are {', '.join(Request.model_fields)}")
    which = f"item {item[0]} " if item else ""
    return RequestError(field, f"{which}must be {_limit(field, bool(item))}, got {_shown(detail)}")


def _limit(field: str, item: bool) -> str:
    schema = Request.model_json_schema()["properties"][field]
    schema = next((choice for choice in schema.get("anyOf", [schema]) if choice["type"] != "null"), schema)
    if item:
        schema = schema["items"]
    noun = _NOUNS[schema["type"]]
    if "maximum" in schema:
        return f"{noun} from {schema['minimum']:,} to {schema['maximum']:,}"
    if "maxLength" in schema:
        return f"{noun} of {schema.get('minLength', 0):,} to {schema['maxLength']:,} characters"
    return f"{noun} of at most {schema['maxItems']:,} items" if "maxItems" in schema else noun


def _shown(detail: ErrorDetails) -> str:
    """What came instead, without the user's text: errors end up in logs."""
    if detail["type"] == "missing":
        return "nothing"
    value = detail["input"]
    if detail["type"] == "string_unicode":
        return "text that is no Unicode (a lone surrogate)"
    if isinstance(value, str):
        return f"text of {len(value):,} characters"
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value):,} items"
    return repr(value) if isinstance(value, bool | int | float | None) else type(value).__name__
