"""Loops closed around forms: ``y = f(u + g(y))``, with the proof that it has one solution.

`Feedthrough` solves the loop that the feedthroughs of f and g close without any state between them; `feedback`
builds the form, and `small_gain` is the proof by the gains of f and g.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wellposed.conditions.certificate import Certificate
from wellposed.conditions.norms import perron_weights
from wellposed.conditions.rounding import EPS, double, reciprocal_gap, upward
from wellposed.errors import IllPosedError, InputError
from wellposed.forms.compose import (
    BlockForm,
    add_blocks,
    add_vectors,
    cat_vectors,
    check_same_device,
    hstack,
    identity,
    image,
    joined_labels,
    linear,
    matmul,
    vstack,
)
from wellposed.forms.evaluation import Stage
from wellposed.forms.form import ImplicitForm
from wellposed.forms.gains import AbsoluteForm, gains, lipschitz_image
from wellposed.forms.operators.base import Operator
from wellposed.forms.operators.block import Block
from wellposed.forms.operators.entries import abs_upper_bound_block
from wellposed.forms.operators.plain import Dense, Identity


@dataclass(frozen=True)
class Feedthrough:
    """Products with M = (I - D K)^-1 and N = (I - K D)^-1, of which one is a small matrix."""

    D: Block
    K: Block
    inverse: Block | None  # M, or N if there are fewer inputs than outputs; None is the identity
    outer: bool  # whether it is M

    @classmethod
    def around(cls, D: Block, K: Block) -> "Feedthrough":
        """Factorises the loop of the feedthroughs, and proves that it is invertible."""
        if not D.parts or not K.parts:
            return cls(D, K, None, True)
        outer = D.shape[0] <= D.shape[1]
        left, right = (D, K) if outer else (K, D)
        size = left.shape[0]
        eye = torch.eye(size, dtype=torch.float64, device=double(torch.empty(0, device=left.device)).device)
        around = _exact(left, eye).apply(_exact(right, eye).apply(eye)).mT
        computed, failed = torch.linalg.inv_ex(eye - around)
        if bool(failed) or not _is_inverse(computed.detach(), around.detach(), left, right):
            names = "D_f D_g" if outer else "D_g D_f"
            raise IllPosedError(
                f"I - {names} is singular to working precision, so the loop of the feedthroughs has no solution "
                "or many; change one of them"
            )
        inverse = Dense(computed.to(device=left.device, dtype=left.dtype))
        return cls(D, K, Block((size,), (size,), {(0, 0): inverse}), outer)

    def M(self, X: Block) -> Block:
        """Returns M X."""
        if self.inverse is None:
            return X
        return matmul(self.inverse, X) if self.outer else add_blocks(X, matmul(self.D, matmul(self.KM, X)))

    def N(self, X: Block) -> Block:
        """Returns N X."""
        if self.inverse is None:
            return X
        return add_blocks(X, matmul(self.K, matmul(self.MD, X))) if self.outer else matmul(self.inverse, X)

    @property
    def KM(self) -> Block:
        """K M = N K."""
        if self.inverse is None:
            return self.K
        return matmul(self.K, self.inverse) if self.outer else matmul(self.inverse, self.K)

    @property
    def MD(self) -> Block:
        """M D = D N."""
        if self.inverse is None:
            return self.D
        return matmul(self.inverse, self.D) if self.outer else matmul(self.D, self.inverse)


def _exact(operator: Operator, like: Tensor) -> Operator:
    return operator.to(device=like.device, dtype=like.dtype)


@torch.no_grad()
def _is_inverse(inverse: Tensor, around: Tensor, left: Block, right: Block) -> bool:
    """Checks |I - R (I - P)|_inf < 1 with outward rounding, which proves I - P invertible."""
    eye, size = torch.eye(len(inverse), dtype=inverse.dtype, device=inverse.device), len(inverse)
    terms = size + left.shape[1] + 4
    magnitude = (
        abs_upper_bound_block(left, inverse.device, False)
        .apply(abs_upper_bound_block(right, inverse.device, False).apply(eye))
        .mT
    )
    rounding = upward(inverse.abs() @ (magnitude + around.abs() + eye), 2 * terms) * (2 * terms * EPS)
    residual = (eye - inverse @ (eye - around)).abs() + rounding
    return float(upward(residual.sum(1), terms).amax()) < 1


SLACKS = (1e-2, 1e-3, 1e-4, 1e-6, 1e-9)


def feedback(f: ImplicitForm, g: ImplicitForm | None = None) -> ImplicitForm:
    """Closes a loop: the y with ``y = f(u + g(y))``; without g, ``y = f(u + y)``.

    With ``v = u + w``, ``w = H z + K y + k`` and ``z = psi(F z + G y + h)`` for g, eliminating y and v gives, with
    ``M = (I - D K)^-1`` and ``N = (I - K D)^-1``, of which the smaller is all that is formed, the state (x, z) and
    ``A = [[A + B N K C, B N H], [G M C, F + G M D H]]``, ``B = [B N; G M D]``, ``C = (M C, M D H)``, ``D = M D``.

    Theorems 2 and 3 of 003 do not cover loops. The loop has one solution if ``lambda_PF(S_f S_g) < 1`` for the
    gains of its parts (`gains`; small gain theorem), since ``y -> f(u + g(y))`` is then a contraction in a
    weighted norm; the weights are carried over to the closed form and checked there, with outward rounding, and
    the certificate of the result says "small gain". Where that fails, the closed form may still be well-posed by a
    condition of its own; its certificate then names that one. A converted or rescaled copy has to prove itself.

    Raises:
        IllPosedError: neither proof succeeds, or ``I - D K`` is singular.

    Example:
        >>> halved = linear(torch.tensor([[0.5]]))
        >>> feedback(halved)(torch.ones(1, 1))
        tensor([[1.]])
    """
    if g is None:
        _, p, q = f.sizes
        if p != q:
            raise InputError(f"unit feedback needs as many outputs as inputs; received {q} and {p}; pass a form g")
        g = linear(Identity(p, f.dtype, f.device))
    check_same_device(f, g)
    if (f.sizes[1], f.sizes[2]) != (g.sizes[2], g.sizes[1]):
        raise InputError(
            f"feedback takes the {f.sizes[2]} outputs of f to its {f.sizes[1]} inputs; received a g of "
            f"{g.sizes[1]} inputs and {g.sizes[2]} outputs"
        )
    closed = _closed(f, g)
    reason = _prove(closed, f, g)
    if reason is not None:
        try:
            closed.certificate()
        except IllPosedError as error:
            raise IllPosedError(f"{reason}; nor is the closed loop well-posed by itself: {error}") from error
    return closed


def small_gain(f: ImplicitForm, g: ImplicitForm) -> Certificate:
    """Bounds lambda_PF(S_f S_g), rounded outward: below one, ``y = f(u + g(y))`` has one solution for every u.

    ``|f(u + g(y)) - f(u + g(y'))| <= S_f S_g |y - y'|`` entry by entry with the gains S, a contraction in the norm
    ``max_i |y_i| / w_i`` if ``S_f S_g w < w`` for some w > 0. It implies that I - D_f D_g is invertible.

    Example:
        >>> small_gain(linear(torch.tensor([[0.5]])), linear(torch.tensor([[-0.5]]))).value < 0.26
        True
    """
    value, weights = _small_gain(*(gains(part, self_loops=False) for part in (f, g)))
    return Certificate.of("small gain", value, weights=weights, gain=reciprocal_gap(value))


def _small_gain(forward: Tensor, back: Tensor) -> tuple[float, Tensor]:
    around = upward(forward @ back, forward.shape[1])  # (q, q)
    weights, value = perron_weights(around)
    return value, weights


def _closed(first: ImplicitForm, second: ImplicitForm) -> ImplicitForm:
    f, g = BlockForm.of(first), BlockForm.of(second)
    solve = Feedthrough.around(f.D, g.D)
    inputs = identity(f.B.widths, f.B)
    entering, reaching = solve.N(inputs), solve.N(g.C)  # v from u, v from z
    seen = solve.M(f.C)  # y from x
    upper = hstack(add_blocks(f.A, matmul(f.B, matmul(solve.KM, f.C))), matmul(f.B, reaching))
    lower = hstack(matmul(g.B, seen), add_blocks(g.A, matmul(g.B, matmul(solve.MD, g.C))))
    column = add_vectors(image(f.D, g.output_bias), f.output_bias)
    shift = image(solve.M(identity(f.C.heights, f.C)), column)  # y where x, z and u vanish
    drive = add_vectors(g.output_bias, image(g.D, shift))
    return BlockForm(
        vstack(upper, lower),
        vstack(matmul(f.B, entering), matmul(g.B, solve.MD)),
        hstack(seen, matmul(solve.MD, g.C)),
        solve.MD,
        cat_vectors(
            add_vectors(f.bias, image(f.B, drive)),
            add_vectors(g.bias, image(g.B, shift)),
            (first.sizes[0], second.sizes[0]),
            f.A,
        ),
        shift,
        f.activations + g.activations,
        joined_labels(f, g),
    ).form(first.input_shape)


@torch.no_grad()
def _prove(closed: ImplicitForm, f: ImplicitForm, g: ImplicitForm) -> str | None:
    """Gives the loops of the closed form their proof by small gain; returns why there is none."""
    try:
        forward, back = gains(f, self_loops=False), gains(g, self_loops=False)
    except IllPosedError as error:
        return f"the gain of a part is not bounded ({error})"
    value, _ = _small_gain(forward, back)
    if not value < 1:
        return f"the small gain condition lambda_PF(S_f S_g) < 1 fails: {value:.6g}"
    absolute = AbsoluteForm.of(f), AbsoluteForm.of(g)
    for formed in (False, True):
        bounded = AbsoluteForm.of(closed, formed=formed)
        for slack in SLACKS:
            proofs = _proofs(closed, bounded, _weights(absolute, (forward, back), slack), value)
            if all(proof.holds for proof in proofs):
                for loop, proof in zip(closed.order.loops, proofs, strict=True):
                    loop.certificate = proof
                return None
    return f"the small gain condition holds ({value:.6g} < 1) but too narrowly to be verified on the closed loop"


def _weights(
    absolute: tuple[AbsoluteForm, AbsoluteForm], gain: tuple[Tensor, Tensor], slack: float
) -> list[Tensor] | None:
    """Turns weights of the outputs into weights of all states, blocks of f first; None if the slack is too large.

    With eta > S_f omega and omega > S_g eta, the states that move by at most v_f under omega and v_g under eta
    obey ``T(|A| v + ...) < v`` in the closed form.
    """
    forward, back = ((1 + slack) * part for part in gain)
    size = len(forward)
    eye = torch.eye(size, dtype=forward.dtype, device=forward.device)
    eta = torch.linalg.solve_ex(eye - forward @ back, eye.new_ones(size))[0]
    omega = back @ eta + slack * (eta.abs().amax() if size else 0.0)
    try:
        states = absolute[0].states(omega[None], slack) + absolute[1].states(eta[None], slack)
    except IllPosedError:
        return None
    return [state[0] for state in states if state.numel()] or [states[0][0]]


def _proofs(
    closed: ImplicitForm, bounded: AbsoluteForm, weights: list[Tensor] | None, value: float
) -> list[Certificate]:
    if weights is None:
        return [Certificate.of("small gain", torch.inf)]
    note = f"lambda_PF(S_f S_g) = {value:.4g}"
    proofs = [_proof(bounded, stage, weights) for stage in closed.order.stages if stage.loop is not None]
    return [replace(proof, note=note) for proof in proofs]


def _proof(bounded: AbsoluteForm, stage: Stage, weights: list[Tensor]) -> Certificate:
    """Checks ``T(|A| v) <= c v`` on one loop, the contraction in max_i |x_i| / v_i by c."""
    inner = bounded.A.chosen(stage.blocks, stage.blocks)
    v = torch.cat([weights[k] for k in stage.blocks])
    if not bool((v.isfinite() & (v > 0)).all()):
        return Certificate.of("small gain", torch.inf)
    v = v / v.amax()
    reached = upward(inner.apply(v[None]), bounded.terms).split(inner.heights, dim=1)
    activations = [bounded.order.activations[k] for k in stage.blocks]
    moved = torch.cat([lipschitz_image(phi, z) for phi, z in zip(activations, reached, strict=True)], dim=1)[0]
    value = float(upward(moved / v, 2).amax()) + 1e-100
    gap = reciprocal_gap(value)
    if all(phi.componentwise for phi in activations):
        return Certificate.of("small gain", value, weights=v, gain=gap)
    return Certificate.of("small gain", value, gain=gap * float(1 / v.amin()) * (1 + 4 * EPS))
