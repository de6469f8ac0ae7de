# %% [markdown]
# # Your own cell as a deep equilibrium model
#
# Any module `cell(x, u) -> x` becomes a layer of infinite depth: `DEQ` returns the state that the cell leaves as
# it is, and differentiates it without storing the steps. Two spirals are told apart by one.

# %%
import math

import torch
from matplotlib import pyplot
from torch import nn

import wellposed as wp
from wellposed.models import jacobian_penalty, path_independence, spectral_norm

generator = torch.Generator().manual_seed(0)
turn = 3.2 * math.pi * torch.rand(400, generator=generator).sqrt()
side = torch.randint(0, 2, (400,), generator=generator)
u = torch.stack([turn.cos(), turn.sin()], 1) * (turn / 10 * (1 - 2.0 * side))[:, None]
u = u + 0.02 * torch.randn(400, 2, generator=generator)


# %% [markdown]
# The cell is ordinary torch. `spectral_norm` keeps the part that acts on the state below 0.9, so that there is one
# equilibrium and the iteration arrives at it.


# %%
class Cell(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.state, self.input = nn.Linear(width, width), nn.Sequential(nn.Linear(2, width), nn.Tanh())
        self.mix = nn.Linear(width, width)
        spectral_norm(self.state, bound=0.9)

    def forward(self, x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.state(x) + 4 * self.mix(self.input(4 * u)))


torch.manual_seed(0)
deq = wp.DEQ(Cell(32), state_shape=(32,))
network = nn.Sequential(deq, nn.Linear(32, 2))

# %% [markdown]
# Train it as any network. A small penalty on the Jacobian of the cell keeps the equations easy.

# %%
optimiser = torch.optim.Adam(network.parameters(), lr=1e-2)
for _ in range(120):
    x = deq(u)
    loss = nn.functional.cross_entropy(network[1](x), side) + 0.01 * jacobian_penalty(deq.cell, x, u).mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
accuracy = float((network(u).argmax(1) == side).double().mean())
print(f"{100 * accuracy:.1f} % of the points are on the right side")

# %% [markdown]
# What a wrapped cell cannot promise is that the equilibrium is the only one. It can be asked:

# %%
solution, independent = deq.equilibrium(u), path_independence(deq, u)
print(solution)
print(independent)

# %%
axis = torch.linspace(-1.1, 1.1, 120)
grid = torch.cartesian_prod(axis, axis)
with torch.no_grad():
    surface = network(grid).softmax(1)[:, 1].view(120, 120)
figure, axes = pyplot.subplots(figsize=(4.5, 4), layout="constrained")
axes.contourf(axis, axis, surface.T, levels=20, cmap="coolwarm", alpha=0.7)
axes.scatter(*u.T, c=side, cmap="coolwarm", s=8, edgecolor="black", linewidth=0.3)
axes.set_aspect("equal")
figure.savefig("wrap_a_cell.png", dpi=120)
