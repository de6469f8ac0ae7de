"""The loop that two feedthroughs close without any state between them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.conditions.rounding import EPS, double, upward
from wellposed.errors import IllPosedError
from wellposed.forms.block import Block
from wellposed.forms.blocks import plus, times
from wellposed.forms.cover import cover_block
from wellposed.forms.operator import Operator
from wellposed.forms.operators import Dense


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
        found, failed = torch.linalg.inv_ex(eye - around)
        if bool(failed) or not _is_inverse(found.detach(), around.detach(), left, right):
            names = "D_f D_g" if outer else "D_g D_f"
            raise IllPosedError(
                f"I - {names} is singular to working precision, so the loop of the feedthroughs has no solution "
                "or many; change one of them"
            )
        inverse = Dense(found.to(device=left.device, dtype=left.dtype))
        return cls(D, K, Block((size,), (size,), {(0, 0): inverse}), outer)

    def M(self, X: Block) -> Block:
        """Returns M X."""
        if self.inverse is None:
            return X
        return times(self.inverse, X) if self.outer else plus(X, times(self.D, times(self.KM, X)))

    def N(self, X: Block) -> Block:
        """Returns N X."""
        if self.inverse is None:
            return X
        return plus(X, times(self.K, times(self.MD, X))) if self.outer else times(self.inverse, X)

    @property
    def KM(self) -> Block:
        """K M = N K."""
        if self.inverse is None:
            return self.K
        return times(self.K, self.inverse) if self.outer else times(self.inverse, self.K)

    @property
    def MD(self) -> Block:
        """M D = D N."""
        if self.inverse is None:
            return self.D
        return times(self.inverse, self.D) if self.outer else times(self.D, self.inverse)


def _exact(operator: Operator, like: Tensor) -> Operator:
    return operator.to(device=like.device, dtype=like.dtype)


@torch.no_grad()
def _is_inverse(found: Tensor, around: Tensor, left: Block, right: Block) -> bool:
    """Checks |I - R (I - P)|_inf < 1 with outward rounding, which proves I - P invertible."""
    eye, size = torch.eye(len(found), dtype=found.dtype, device=found.device), len(found)
    terms = size + left.shape[1] + 4
    spread = cover_block(left, found.device, False).apply(cover_block(right, found.device, False).apply(eye)).mT
    rounding = upward(found.abs() @ (spread + around.abs() + eye), 2 * terms) * (2 * terms * EPS)
    residual = (eye - found @ (eye - around)).abs() + rounding
    return float(upward(residual.sum(1), terms).amax()) < 1
