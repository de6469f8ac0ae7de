"""Certificates as files: what is proven of a saved model, in a form that `wellposed.checker` checks on its own."""

import copy
import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wellposed.activations import Activation
from wellposed.atomic import atomic_write
from wellposed.checker import RefusedError, certificate_path, check
from wellposed.checker.check import CONFIG, FORMAT
from wellposed.conditions.certificate import Certificate, comparison
from wellposed.conditions.conditions import StateMatrix
from wellposed.conditions.norms import perron_weights
from wellposed.conditions.rounding import double, upward
from wellposed.errors import IllPosedError, InputError
from wellposed.forms import ImplicitForm
from wellposed.forms.operators.block import Block
from wellposed.models.implicit import ImplicitModel
from wellposed.models.io.files import file_digest, pack_tensors, write_tensors
from wellposed.models.recurrent import ImplicitRNN

# Room for the checker, whose factors of matrices are approximate and whose constants of phi have fewer digits.
ROOM = 1e-9
CHECKED = ("inf", "weighted", "mu", "triangular", "spectral", "monotone")
Certified = ImplicitModel | ImplicitRNN | ImplicitForm


@dataclass(frozen=True, eq=False)
class Claim:
    """One statement about a saved model.

    Args:
        kind: "well-posed", "enclosure", "continuation", "branch" or "row-gaps".
        facts: numbers and texts, as JSON holds them; a tensor is named by the key under which it is in `tensors`.
        tensors: what the checker needs beside the model, in float64.
        about: the part of the model, empty for one that has only one.
    """

    kind: str
    facts: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    about: str = ""


def write_certificate(
    model: Certified, path: str | os.PathLike[str], claims: Iterable[Claim] = (), *, config: bool = False
) -> Path:
    """Writes what is proven of a model beside the file in which it was saved, and has it checked.

    The model must evaluate what the file holds, as those that `with_projected_parameters` returns do; `save` does
    so with ``certificate=True``.

    Args:
        model: as it was saved.
        path: the file; the certificate has its name with the ending .cert.
        claims: what is claimed beside well-posedness; if they are about branches of equilibria alone, the model
            need not be well-posed.
        config: whether the configuration lies beside the file, as in a folder of `save_pretrained`.

    Raises:
        IllPosedError: well-posedness is not proven, or the checker refuses a claim; then there is no certificate.
    """
    target = certificate_path(Path(path))
    try:
        with atomic_write(target) as temporary:
            prove_file(model, Path(path), temporary, claims, config=config)
    except IllPosedError:
        target.unlink(missing_ok=True)
        raise
    return target


def prove_file(
    model: Certified, path: Path, target: Path, claims: Iterable[Claim] = (), *, config: bool = False
) -> None:
    """Writes the certificate of the model file `path` to `target` and has it checked."""
    listed: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    claims = list(claims)
    try:
        posed = well_posed(model)
    except IllPosedError:
        if not claims or any(claim.kind != "branch" for claim in claims):
            raise
        posed = []
    for number, claim in enumerate([*posed, *claims]):
        names = {name: f"{number}.{name}" for name in claim.tensors}
        tensors |= {names[name]: double(value).cpu().contiguous() for name, value in claim.tensors.items()}
        listed.append({"kind": claim.kind, "about": claim.about, **_renamed(claim.facts, names)})
    content: dict[str, Any] = {"sha256": file_digest(path)}
    if config:
        content["config_sha256"] = file_digest(path.with_name(CONFIG))
    versions = {"wellposed": sys.modules["wellposed"].__version__, "torch": torch.__version__}
    content |= {"claims": listed, "versions": {**versions, "python": platform.python_version()}}
    metadata = {"format": FORMAT, "certificate": json.dumps(content, allow_nan=False)}
    tensors, table = pack_tensors(tensors)
    if table:
        metadata["packed"] = json.dumps(table)
    write_tensors(target, tensors, metadata)
    try:
        check(path, target)
    except RefusedError as error:
        target.unlink()
        raise IllPosedError(f"no certificate was written, for the checker refuses it: {error}") from error


def well_posed(model: Certified) -> list[Claim]:
    """Claims that every equation of a model has exactly one solution.

    Example:
        >>> [claim.facts["condition"] for claim in well_posed(ImplicitModel(3, 2, 4))]
        ['inf']
    """
    if isinstance(model, ImplicitForm):
        return [_of_form(model)]
    if isinstance(model, ImplicitModel):
        return [_of_state(model.state, "")]
    if isinstance(model, ImplicitRNN):
        return [_of_state(model.cell(k).state, f"cells.{k}") for k in range(len(model.cells))]
    raise InputError(f"certificates are of implicit models and forms; received {type(model).__name__}")


def with_projected_parameters(model: Certified) -> Certified:
    """Returns a copy whose free parameters are the matrices it evaluates, so that its file holds them.

    Outputs stay the same bit for bit. Where the map that keeps A well-posed would change its own result by
    rounding, the cap of the copy is raised by as much.
    """
    if isinstance(model, ImplicitForm):
        return model
    twin = copy.deepcopy(model)
    for cell in [twin] if isinstance(twin, ImplicitModel) else [twin.cell(k) for k in range(len(twin.cells))]:
        state = cell.state
        if not hasattr(state, "raw"):
            state.project_()
            continue
        with torch.no_grad():
            A = state.dense().clone()
        if not torch.equal(A, state.raw):
            cell.state = _fixed(state, A)
    return twin


def _fixed(state: StateMatrix, A: Tensor) -> StateMatrix:
    proof = state.condition.certify(A, state.activation)
    if not proof.holds:
        raise IllPosedError(f"the model is not proven well-posed: {proof}")
    try:
        return StateMatrix.of(A, state.activation, proof, state.kappa)
    except IllPosedError:
        return StateMatrix.of(A, state.activation, proof, None)


def _of_state(state: StateMatrix, about: str) -> Claim:
    with torch.no_grad():
        return _claim(state.dense(), state.activation, state.certificate(), about)


def _of_form(form: ImplicitForm) -> Claim:
    proof = form.certificate()
    if not form.order.loops and isinstance(form.A, Block):
        return Claim("well-posed", {"condition": "acyclic", "value": 0.0})
    if len(form.partition) == 1:
        return _claim(form.A.to_dense(), form.activations[0], proof, "")
    try:
        return _weighted(form.A.to_dense(), form.activations, form.partition)
    except IllPosedError:
        return _components(form)


def _components(form: ImplicitForm) -> Claim:
    """Proves a form loop by loop, each by a condition of its own."""
    loops, tensors = list[dict[str, Any]](), dict[str, Tensor]()
    for stage in form.order.stages:
        if stage.loop is None:
            continue
        A, phis = stage.loop.A.to_dense(), [form.activations[k] for k in stage.blocks]
        if not all(phi.componentwise for phi in phis):
            raise IllPosedError("loops through maps that act on blocks have no certificate that is a file")
        if stage.loop.certificate.condition in CHECKED:
            one = _stated(stage.loop.certificate, "")
        else:
            one = _weighted(A, phis, [form.partition[k] for k in stage.blocks])
        names = {name: f"{name}{len(loops)}" for name in one.tensors}
        tensors |= {names[name]: value for name, value in one.tensors.items()}
        loops.append({"blocks": list(stage.blocks), **_renamed(one.facts, names)})
    value = max(loop["value"] for loop in loops)
    return Claim("well-posed", {"condition": "components", "value": value, "loops": loops}, tensors)


def _weighted(A: Tensor, activations: Sequence[Activation], sizes: Sequence[int]) -> Claim:
    """Proves a form of several blocks as a whole, by weights of all its states."""
    if not all(phi.componentwise for phi in activations):
        raise IllPosedError("loops among blocks on which phi acts as a whole have no certificate that is a file")
    constants = torch.tensor([phi.lipschitz() for phi in activations], dtype=torch.float64)
    gamma = constants.repeat_interleave(torch.tensor(list(sizes)))
    weights, value = perron_weights(upward(double(A).abs() * gamma[:, None], 1))
    return _stated(Certificate.of("weighted", value, weights=weights), "")


def _claim(A: Tensor, activation: Activation, proof: Certificate, about: str) -> Claim:
    if proof.condition == "block":
        return _of_blocks(A, activation, about)
    if proof.condition not in CHECKED:
        raise IllPosedError(f"the condition {proof.condition!r} has no certificate that is a file")
    return _stated(proof, about)


def _of_blocks(A: Tensor, activation: Activation, about: str) -> Claim:
    """Proves a map on blocks in the norm 1 or inf, whose induced norms are sums."""
    proofs = []
    for norm in ("1", "inf"):
        if norm in activation.constants:
            weights, value = perron_weights(comparison(double(A), activation, norm).matrix)
            proofs.append(Certificate.of("block", value, weights=weights, norm=norm))
    return _stated(min(proofs, key=lambda proof: proof.value), about)


def _stated(proof: Certificate, about: str) -> Claim:
    if not proof.holds:
        raise IllPosedError(f"nothing to certify: {proof}")
    roomy = proof.value + ROOM * abs(proof.value)
    facts = {"condition": proof.condition, "value": roomy if roomy < 1 else proof.value, "norm": proof.norm}
    tensors = {} if proof.weights is None else {"weights": proof.weights}
    return Claim("well-posed", facts | ({"weights": "weights"} if tensors else {}), tensors, about)


def _renamed(facts: Any, names: dict[str, str]) -> Any:
    """Gives tensors the names under which they are stored."""
    if isinstance(facts, dict):
        return {key: _renamed(value, names) for key, value in facts.items()}
    if isinstance(facts, list):
        return [_renamed(value, names) for value in facts]
    return names.get(facts, facts) if isinstance(facts, str) else facts
