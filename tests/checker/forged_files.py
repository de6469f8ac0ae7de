"""Model and certificate files made by hand, with whatever content a forger likes."""

import hashlib
import json
import struct
from pathlib import Path

import numpy as np

KINDS = {"float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64"}


def write_tensors(path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> Path:
    header, blobs, offset = {"__metadata__": metadata}, [], 0
    for name, value in tensors.items():
        data = np.ascontiguousarray(value).tobytes()
        shape, kind = list(value.shape), KINDS[str(value.dtype)]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        blobs.append(data)
        offset += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))
    return path


def write_model(path: Path, A: np.ndarray, activation="relu", **others: np.ndarray) -> Path:
    n, others = len(A), {"B": np.zeros((len(A), 1), A.dtype), "C": np.zeros((1, len(A)), A.dtype), **others}
    p, q, flags = others["B"].shape[1], len(others["C"]), {"feedthrough": "D" in others, "bias": "bias" in others}
    config = cell_config(in_features=p, out_features=q, state_features=n, activation=activation, **flags)
    metadata = {"format": "wellposed-1", "config": json.dumps(config)}
    return write_tensors(path, {"state.raw": A, **others}, metadata)


def cell_config(**changes) -> dict:
    """Returns the configuration of a model of one state, one input and one output, as the library writes it."""
    config = {
        **{"in_features": 1, "out_features": 1, "state_features": 1, "activation": "relu", "kappa": 0.95},
        **{"condition": "inf", "triangle": None, "rank": None, "feedthrough": False, "bias": False},
        **{"solver": None, "stop": None, "max_steps": None, "gradient": None, "on_failure": "warn"},
        "executor": "auto",
    }
    return {**config, **changes}


def dense(name: str, **others) -> dict:
    return {"operator": "Dense", "matrix": {"tensor": name, **others}}


def zero(rows: int, columns: int, dtype: str = "float64") -> dict:
    return {"operator": "Zero", "size": {"tuple": [rows, columns]}, "kind": {"dtype": dtype}, "place": "cpu"}


def block(sizes: list[int], blocks: dict[tuple[int, int], dict], dtype: str = "float64") -> dict:
    """Returns the header of a square block matrix."""
    pairs = [[{"tuple": [*key]}, operator] for key, operator in blocks.items()]
    size = {"tuple": sizes}
    home = {"kind": {"dtype": dtype}, "place": "cpu"}
    return {"operator": "Block", "heights": size, "widths": size, "parts": {"dict": pairs}, **home}


def form_header(A: dict, q: int, p: int, **changes) -> dict:
    """Returns the header of a form with dense B and C and without D and biases, as the library writes it."""
    matrices = {"A": A, "B": dense("B"), "C": dense("C"), "D": zero(q, p), "bias": None, "output_bias": None}
    return {**matrices, "activation": "relu", "input_shape": [p], "labels": [], "dtype": "float64", **changes}


def write_form(path: Path, header: dict, **tensors: np.ndarray) -> Path:
    return write_tensors(path, tensors, {"format": "wellposed-form-1", "form": json.dumps(header)})


def write_claims(model: Path, claims: list[dict], tensors: dict[str, np.ndarray] | None = None, **said) -> Path:
    body = {"sha256": hashlib.sha256(model.read_bytes()).hexdigest(), "claims": claims, **said}
    metadata = {"format": "wellposed-certificate-1", "certificate": json.dumps(body)}
    return write_tensors(model.with_suffix(".cert"), tensors or {}, metadata)


def read_parts(path: Path) -> tuple[dict, bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def rewritten(path: Path, header: dict, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def change_claims(path: Path, change) -> None:
    """Lets `change` edit what a certificate says, and leaves everything else as it is."""
    header, data = read_parts(path)
    said = json.loads(header["__metadata__"]["certificate"])
    change(said)
    header["__metadata__"]["certificate"] = json.dumps(said)
    rewritten(path, header, data)


def certify_anew(model: Path) -> None:
    """Names the digest of the file as it is now, as a forger would who changed it."""

    def change(said):
        said["sha256"] = hashlib.sha256(model.read_bytes()).hexdigest()

    change_claims(model.with_suffix(".cert"), change)
