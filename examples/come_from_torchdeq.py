# %% [markdown]
# # From torchdeq, in two steps
#
# First change the import: `wellposed.compat.torchdeq` answers the calls of torchdeq 0.1.0. Then, when there is
# time, take the native names. Both give the same equilibrium here.

# %%
import torch
from torch import nn

import wellposed as wp
from wellposed.compat.torchdeq import apply_norm, get_deq, reset_deq


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state, self.input = nn.Linear(16, 16), nn.Linear(4, 16)

    def forward(self, z: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.state(z) + self.input(u))


torch.manual_seed(0)
block, u = Block(), torch.randn(8, 4)

# %% [markdown]
# Step one. The code below is that of a torchdeq user but for the import above.

# %%
apply_norm(block, "spectral_norm", filter_out="input", norm_target_norm=0.9)
deq = get_deq(f_solver="anderson", f_max_iter=60, f_tol=1e-6, f_stop_mode="rel", ift=True)
reset_deq(block)
z_out, info = deq(lambda z: block(z, u), torch.zeros(8, 16))
z_out[-1].sum().backward()
gradient = block.input.weight.grad.clone()
print("steps of each sample:", info["nstep"].tolist())

# %% [markdown]
# An option that does not exist is an error here, not silence:

# %%
try:
    get_deq(f_max_iters=60)
except TypeError as mistake:
    message = str(mistake)
    print(message)

# %% [markdown]
# Step two. The cell takes its input as an argument, so finished samples leave the computation; each sample has a
# status, a number of steps and a residual of its own.

# %%
model = wp.DEQ(block, state_shape=(16,), stop=wp.Relative(1e-6, norm="2"), max_steps=60)
block.input.weight.grad = None
z = model(u)
z.sum().backward()
difference = float((z - z_out[-1]).detach().abs().max())
apart = float((block.input.weight.grad - gradient).abs().max())
print(f"equilibria differ by {difference:.1e}, gradients by {apart:.1e}")
print(model.equilibrium(u))
