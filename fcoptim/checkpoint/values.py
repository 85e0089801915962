"""Nested Python values as JSON plus named tensors, and back. Nothing is ever executed to read them.

JSON has no tuples, no infinities and no keys but strings, and an optimizer's state may hold all of these. Such values
are objects with one key that begins with ``$``.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..distributed.shards import is_sharded
from .layout import CheckpointError, Json
from .tensorfile import CODES

_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"$dict": dict, "$ordered": OrderedDict, "$counter": Counter}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Encoder:
    """Turns values into JSON and collects the tensors in them.

    Args:
        what: What the values are, for messages: ``"the optimizer's state"``.
        sharded: Whether DTensors are taken; they are saved whole. Default False.

    Attributes:
        tensors: By the keys that the JSON refers to.
        refused: What can't be saved: path and reason.
    """

    def __init__(self, what: str, *, sharded: bool = False) -> None:
        self.what = what
        self._sharded = sharded
        self.tensors: dict[str, torch.Tensor] = {}
        self.refused: list[str] = []

    def encode(self, value: Any, path: str) -> Json:
        """Encode one value.

        Args:
            value: None, bool, int, float, str, tensor, dtype, device, and list, tuple, dict, ``OrderedDict`` and
                ``Counter`` of these. Anything else is noted in ``refused``.
            path: Where it stands; names its tensors.
        """
        if value is None or type(value) in (bool, int, str):
            return value
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": str(float(value))}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        if type(value) in (list, tuple, torch.Size):
            items = [self.encode(item, f"{path}.{number}") for number, item in enumerate(value)]
            return items if type(value) is list else {"$tuple": items}
        if type(value) in _MAPPINGS.values():
            return self._mapping(value, path)
        return self._refuse(path, f"{type(value).__module__}.{type(value).__qualname__}")

    def check(self) -> None:
        """Name what could not be encoded.

        Raises:
            CheckpointError: There was something.
        """
        if self.refused:
            more = f" and {len(self.refused) - 5} more" if len(self.refused) > 5 else ""
            raise CheckpointError(
                f"{self.what} holds values that can't be saved without pickle: {'; '.join(self.refused[:5])}{more}. "
                "Tensors, numbers, strings, None and lists, tuples and dicts of these can"
            )

    def _refuse(self, path: str, reason: str) -> None:
        self.refused.append(f"{path} ({reason})")

    def _mapping(self, value: dict[Any, Any], path: str) -> Json:
        if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(item, f"{path}.{key}") for key, item in value.items()}
        tag = next(tag for tag, kind in _MAPPINGS.items() if kind is type(value))
        pairs = []
        for key, item in value.items():
            if isinstance(key, torch.Tensor):
                self._refuse(path, "a dict with tensors as keys")
                return None
            pairs.append([self.encode(key, f"{path} (a key)"), self.encode(item, f"{path}.{key}")])
        return {tag: pairs}

    def _tensor(self, value: torch.Tensor, path: str) -> Json:
        known = type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        if not known and not (self._sharded and is_sharded(value)):
            self._refuse(path, f"a tensor of type {type(value).__name__}")
        elif value.layout is not torch.strided or value.is_quantized or value.is_meta or value.is_nested:
            self._refuse(path, f"a tensor of layout {value.layout} on {value.device}")
        elif value.dtype not in CODES:
            self._refuse(path, f"a tensor of {value.dtype}")
        elif value.ndim == 0 and _is_plain_number(value):
            return {"$scalar": [str(value.dtype).removeprefix("torch."), value.item()]}
        else:
            key, number = path, 1
            while key in self.tensors:
                key, number = f"{path}#{number}", number + 1
            self.tensors[key] = value
            return {"$tensor": key}
        return None


def _is_plain_number(value: torch.Tensor) -> bool:
    """Whether JSON holds a 0-d tensor exactly. NaNs have payloads, so they are written as tensors."""
    if value.dtype.is_complex or (value.dtype.itemsize == 1 and value.dtype.is_floating_point):
        return False
    return not value.dtype.is_floating_point or math.isfinite(value.item())


class Decoder:
    """Turns JSON back into values.

    Args:
        tensor: Finds a tensor by its key, or raises KeyError.
        path: The file, for messages.
        references: More tags: how to read what stands behind each.
    """

    def __init__(
        self,
        tensor: Callable[[str], torch.Tensor],
        path: object,
        references: Mapping[str, Callable[[Any], Any]] | None = None,
    ) -> None:
        self.path = path
        self.tags: dict[str, Callable[[Any], Any]] = {
            "$float": _FLOATS.__getitem__,
            "$tensor": tensor,
            "$scalar": _scalar,
            "$dtype": _DTYPES.__getitem__,
            "$device": torch.device,
            "$tuple": lambda items: tuple(self._decode(item) for item in items),
            **(references or {}),
        }

    def decode(self, value: Json) -> Any:
        """Decode one value.

        Raises:
            CheckpointError: It is not what an encoder writes, or a tensor is missing.
        """
        try:
            return self._decode(value)
        except (KeyError, TypeError, ValueError, RuntimeError, RecursionError) as error:
            raise CheckpointError(f"{self.path} is damaged: {error!r}") from error

    def _decode(self, value: Json) -> Any:
        if isinstance(value, list):
            return [self._decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        tag = next(iter(value), "")
        if not tag.startswith("$"):
            return {key: self._decode(item) for key, item in value.items()}
        if tag in _MAPPINGS:
            return _MAPPINGS[tag]({self._decode(key): self._decode(item) for key, item in value[tag]})
        return self.tags[tag](value[tag])


def _scalar(spec: Any) -> torch.Tensor:
    dtype, number = spec
    return torch.tensor(number, dtype=_DTYPES[dtype])
