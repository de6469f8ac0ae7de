"""What can be said of the Triton loops over time without a GPU: when they are taken.

Their arithmetic is checked by `test_gpu_interpreter`.
"""

import pytest
import torch

from wellposed import ImplicitRNN, Phantom, Relative
from wellposed.activations import leaky_relu
from wellposed.errors import InputError
from wellposed.kernels.gpu import engine


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"gradient": Phantom(3)}, "gradient Phantom has no kernel"),
        ({"activation": "gelu", "kappa": 0.5}, "activation gelu has no kernel"),
        ({"activation": leaky_relu(-0.2)}, "leaky_relu with a negative slope has no kernel on the GPU"),
        ({"rank": 2}, "low-rank matrices have no kernel"),
        ({"solver": "newton"}, "solver Newton has no kernel"),
        ({"stop": Relative(norm="2")}, "stopping rule Relative in the norm '2' has no kernel"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_has_no_kernel_says_why_and_raises_where_triton_was_asked_for(options, reason):
    rnn = ImplicitRNN(2, 3, 4, executor="triton", **{"batch_first": True, **options})
    assert rnn.explain(torch.zeros(1, 2, 2)).endswith(f"not triton for whole sequences: {reason}")
    with pytest.raises(InputError, match='executor="triton" cannot compute this'):
        rnn(torch.zeros(1, 2, 2))


def test_sizes_dtypes_and_devices_without_kernels(monkeypatch):
    s, told = torch.zeros(1, 2, 2), "\nnot triton for whole sequences: "
    wide = ImplicitRNN(2, 3, 129, executor="triton", batch_first=True)
    assert f"{told}more than 128 states or hidden states have no kernel on the GPU" in wide.explain(s)
    long = ImplicitRNN(2, 3, 4, executor="triton", batch_first=True).double()
    assert long.explain(s.double()).endswith(f"{told}float64 has no kernel on the GPU")
    monkeypatch.setattr(engine, "interpreted", lambda: False)
    here = ImplicitRNN(2, 3, 4, executor="triton", batch_first=True)
    assert here.explain(s).endswith(f"{told}device cpu has no kernel of triton")
