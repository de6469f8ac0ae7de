"""Changes to bytes and to JSON that readers get wrong most often."""

import copy
import json
import random
import struct
from typing import Any

INTERESTING = (0, 1, -1, 2, 127, 255, 256, 65535, 2**31 - 1, 2**31, 2**32, 2**40, 2**63 - 1, 2**63, -(2**31))
DEEP: Any = []
for _ in range(60):
    DEEP = [DEEP]
VALUES = (
    *(None, True, False, 0, 1, -1, 3, 10**6, 2**31, 2**63, 10**30, 0.5, 1e308, -1e308, float("nan"), float("inf")),
    *("", "x", "x" * 5000, "\0", "../../etc/passwd", "__class__", "relu", "softmax(99999999999)"),
    *([], {}, [1, 2, 3], {"type": "Picard"}, {"tensor": "B"}, {"tuple": [0, 0]}, DEEP),
)


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Changes a few places of a file."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        position, kind = draw.randrange(len(changed) + 1), draw.randrange(8)
        if kind == 0 and changed:
            changed[position % len(changed)] ^= 1 << draw.randrange(8)
        elif kind == 1 and changed:
            changed[position % len(changed)] = draw.randrange(256)
        elif kind == 2:
            del changed[position : position + draw.choice((1, 2, 8, 64, len(changed)))]
        elif kind == 3:
            changed[position:position] = draw.randbytes(draw.choice((1, 4, 64)))
        elif kind == 4:
            changed[position:position] = changed[: draw.choice((1, 8, 512))]
        elif kind == 5:
            width, order = draw.choice((2, 4, 8)), draw.choice("<>")
            value = draw.choice(INTERESTING) & (2 ** (8 * width) - 1)
            packed = struct.pack(order + {2: "H", 4: "I", 8: "Q"}[width], value)
            changed[position : position + width] = packed
        elif kind == 6:
            digits = str(draw.choice(INTERESTING)).encode()
            changed[position : position + len(digits)] = digits
        else:
            changed = changed[:position]
    return bytes(changed)


def mutated_json(value: Any, draw: random.Random) -> Any:
    """Changes a few nodes of a table."""
    changed = copy.deepcopy(value)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        changed = _changed(changed, draw)
    return changed


def _changed(value: Any, draw: random.Random) -> Any:
    places = list(_places(value))
    if not places:
        return copy.deepcopy(draw.choice(VALUES))
    holder, key = draw.choice(places)
    kind = draw.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1:
        other, name = draw.choice(places)
        holder[key] = copy.deepcopy(other[name]) if _has(other, name) else None
    elif kind == 2 and isinstance(holder[key], int | float):
        holder[key] = holder[key] * draw.choice((-1, 2, 1000, 10**9)) + draw.choice((0, 1, -1))
    elif kind == 3 and isinstance(holder, dict):
        holder[draw.choice(("x", "operator", "type", "tensor", "kind", ""))] = copy.deepcopy(draw.choice(VALUES))
    else:
        holder[key] = copy.deepcopy(draw.choice(VALUES))
    return value


def _has(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else key < len(holder)


def _places(value: Any) -> Any:
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def mutated_safetensors(data: bytes, draw: random.Random) -> bytes:
    """Changes the header of a safetensors file, also the JSON inside its metadata."""
    (length,) = struct.unpack("<Q", data[:8])
    header, tail = json.loads(data[8 : 8 + length]), data[8 + length :]
    metadata = header.get("__metadata__", {})
    metadata.pop("sha256", None)  # a forger leaves the seal off
    inner = [name for name, text in metadata.items() if text[:1] in "{["]
    if inner and draw.random() < 0.8:
        name = draw.choice(inner)
        metadata[name] = json.dumps(mutated_json(json.loads(metadata[name]), draw))
    elif draw.random() < 0.8:
        header = mutated_json(header, draw)
    else:
        tail = mutated(tail, draw)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + tail
