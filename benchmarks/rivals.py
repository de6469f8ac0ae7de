"""The same model in torchidl and torchdeq."""

import torch
from torch import Tensor, nn

from wellposed import ImplicitModel

TOLERANCE = 3e-6


def ours(A: Tensor, B: Tensor, C: Tensor, **options: object) -> nn.Module:
    """Returns our model with the given matrices."""
    return ImplicitModel.from_matrices(A, B, C, max_steps=3000, executor="reference", **options)


def torchidl_model(A: Tensor, B: Tensor, C: Tensor) -> nn.Module:
    """Returns torchidl's ImplicitModel with the given matrices and its own solver."""
    import torchidl

    model = torchidl.ImplicitModel(
        B.shape[1], C.shape[0], A.shape[0], no_D=True, mitr=3000, grad_mitr=3000, kappa=0.9999
    )
    with torch.no_grad():
        model.A.copy_(A)
        model.B.copy_(B)
        model.C.copy_(C)
    return model


class _TorchdeqModel(nn.Module):
    def __init__(self, A: Tensor, B: Tensor, C: Tensor) -> None:
        super().__init__()
        from torchdeq import get_deq

        self.A, self.B, self.C = (nn.Parameter(m.clone()) for m in (A, B, C))
        self.deq = get_deq(
            f_solver="anderson", f_max_iter=200, f_tol=TOLERANCE, f_stop_mode="abs",
            b_solver="anderson", b_max_iter=200, b_tol=TOLERANCE, b_stop_mode="abs", ift=True,
        )  # fmt: skip

    def forward(self, u: Tensor) -> Tensor:
        v = u @ self.B.mT
        z, _ = self.deq(lambda x: torch.relu(x @ self.A.mT + v), torch.zeros_like(v))
        return z[-1] @ self.C.mT


def torchdeq_model(A: Tensor, B: Tensor, C: Tensor) -> nn.Module:
    """Returns the model written for torchdeq, with Anderson acceleration and implicit differentiation."""
    return _TorchdeqModel(A, B, C)
