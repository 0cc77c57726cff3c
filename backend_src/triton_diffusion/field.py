"""A field of a request: its name, type and bounds, declared once and used by everything that touches it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from triton_diffusion.errors import FieldTypeError, FieldValueError

Value = int | float | str

_TRITON_TYPES = {"int": "TYPE_INT32", "float": "TYPE_FP32", "str": "TYPE_STRING", "image": "TYPE_UINT8"}
_TYPE_WORDS = {"int": "an integer", "float": "a number", "str": "a string", "image": "an RGB image"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """One field of a request.

    Args:
        name: of the Triton input and of the request parameter.
        kind: int, float, str or image.
        description: one line for the documentation, with the unit.
        minimum, maximum: inclusive bounds of a number; of the length of a string in characters.
        choices: the allowed values of a string; empty allows any.
        argument: the argument of the pipeline's call that takes it; a pipeline without it does not take the
            field. Empty: every pipeline takes it.
        in_strict_key: whether vLLM-Omni's rule keeps requests apart that differ in it.
        wide: a 64 bit integer.
    """

    name: str
    kind: str
    description: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    argument: str = ""
    in_strict_key: bool = False
    required: bool = False
    wide: bool = False

    @property
    def triton_type(self) -> str:
        return "TYPE_INT64" if self.wide else _TRITON_TYPES[self.kind]

    @property
    def dims(self) -> list[int]:
        """The shape of the Triton input, without the batch dimension."""
        return [-1, -1, 3] if self.kind == "image" else [1]

    @property
    def allowed(self) -> str:
        """The allowed values in words: `an integer from 1 to 1000`."""
        words = _TYPE_WORDS[self.kind]
        if self.kind == "str":
            if self.choices:
                return f"one of {', '.join(self.choices)}"
            return f"{words} of {self.minimum or 0:.0f} to {self.maximum:.0f} characters" if self.maximum else words
        if self.minimum is not None and self.maximum is not None:
            return f"{words} from {self.minimum} to {self.maximum}"
        return words

    def parse(self, value: object) -> Any:
        """`value` (a Python value, or a tensor of one element; an image as [H, W, 3]) checked and converted.

        Raises:
            FieldTypeError, FieldValueError: naming the field, the value and what is allowed.
        """
        if self.kind == "image":
            return self._parse_image(value)
        if isinstance(value, np.ndarray):
            value = self._only_element(value)
        if self.kind == "str":
            return self._parse_string(value)
        return self._parse_number(value)

    def _only_element(self, tensor: np.ndarray[Any, Any]) -> object:
        if tensor.size != 1:
            remedy = "send one request for each prompt" if self.name == "prompt" else "send exactly one"
            raise FieldValueError(f"{self.name} holds {tensor.size} values: {remedy}")
        return tensor.reshape(-1)[0]

    def _parse_string(self, value: object) -> str:
        if isinstance(value, bytes):
            try:
                value = value.decode("utf-8")
            except UnicodeDecodeError as error:
                raise FieldTypeError(
                    f"{self.name}={_shown(value)}: not valid UTF-8 ({error.reason} at byte {error.start}); "
                    "encode the text as UTF-8"
                ) from None
        if not isinstance(value, str):
            raise self._type_error(value)
        if self.choices and value not in self.choices:
            raise self._value_error(value)
        if len(value) < (self.minimum or 0) or (self.maximum is not None and len(value) > self.maximum):
            raise FieldValueError(f"{self.name}={_shown(value)} has {len(value)} characters: must be {self.allowed}")
        if self.minimum and not value.strip():
            raise FieldValueError(f"{self.name}={_shown(value)} is blank: must be {self.allowed}, and not only spaces")
        return value

    def _parse_number(self, value: object) -> int | float:
        integer = isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))
        if self.kind == "int":
            if not integer:
                raise self._type_error(value)
            number: int | float = int(value)  # type: ignore[call-overload]
        else:
            if not integer and not isinstance(value, (float, np.floating)):
                raise self._type_error(value)
            number = float(value)  # type: ignore[arg-type]
            if not math.isfinite(number):
                raise self._value_error(value)
        below = self.minimum is not None and number < self.minimum
        if below or (self.maximum is not None and number > self.maximum):
            raise self._value_error(value)
        return number

    def _parse_image(self, value: object) -> np.ndarray[Any, Any]:
        if not isinstance(value, np.ndarray) or value.dtype != np.uint8:
            raise FieldTypeError(f"{self.name}: must be a UINT8 tensor of shape [height, width, 3]")
        image: np.ndarray[Any, Any] = value[0] if value.ndim == 4 and len(value) == 1 else value
        if image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
            raise FieldValueError(f"{self.name} has shape {list(image.shape)}: must be [height, width, 3], one image")
        return image

    def _type_error(self, value: object) -> FieldTypeError:
        return FieldTypeError(f"{self.name}={_shown(value)} is of type {type(value).__name__}: must be {self.allowed}")

    def _value_error(self, value: object) -> FieldValueError:
        return FieldValueError(f"{self.name}={_shown(value)}: must be {self.allowed}")


def field(description: str, **declaration: Any) -> Any:
    """A dataclass attribute that is also a `Field`; name and kind come from the attribute itself.

    The attribute's default is None, which means "not given": the model's default applies.
    """
    required = declaration.get("required", False)
    metadata = {"field": {"description": description, **declaration}}
    if required:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=None, metadata=metadata)


def fields_of(record: type) -> Iterator[Field]:
    """The fields that a dataclass declares by `field()`, in order."""
    for attribute in dataclasses.fields(record):
        if "field" in attribute.metadata:
            kind = str(attribute.type).split(" |")[0]
            yield Field(
                name=attribute.name,
                kind="image" if "ndarray" in kind else kind,
                **attribute.metadata["field"],
            )


def _shown(value: object, limit: int = 60) -> str:
    text = repr(value.item() if isinstance(value, np.generic) else value)
    return text if len(text) <= limit else f"{text[:limit]}…"
