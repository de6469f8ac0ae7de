# %% [markdown]
# # Equilibria under noise
#
# On analogue hardware, every step of an iteration is a little wrong. `Noise` puts Gaussian noise into a model by
# its signal-to-noise ratio. Nothing is ever at rest then; what can be judged, and used, are means.

# %%
import torch
from matplotlib import pyplot

import wellposed as wp
from wellposed.models import DenseCell

torch.manual_seed(0)
u = torch.randn(64, 10)
cell = DenseCell(10, 100)
exact = wp.DEQ(cell)(u).detach()


def error(x: torch.Tensor) -> float:
    return float((x.detach() - exact).norm() / exact.norm())


# %% [markdown]
# The ordinary stopping rule waits for a residual that never comes, and says so for every sample:

# %%
noise = wp.Noise(state=20.0, generator=torch.Generator().manual_seed(0))
deq = wp.DEQ(cell, solver="picard", max_steps=60, noise=noise, on_failure="ignore")
waiting = deq.equilibrium(u)
print(waiting)

# %% [markdown]
# `MeanRelative` watches the mean of the last iterates, and returns it:

# %%
deq.stop = wp.MeanRelative(0.03, window=10)
judged = deq.equilibrium(u)
print(judged)
print(f"error of the last iterate {error(waiting.value):.3f}, of the mean {error(judged.value):.3f}")

# %% [markdown]
# Longer windows average more noise away, and `RobbinsMonro` damps each step. The noise is 20 dB: 10 % of the
# state.

# %%
windows = (1, 3, 10, 30)
errors: dict[str, list[float]] = {"Picard": [], "Robbins-Monro": []}
for name, solver in (("Picard", "picard"), ("Robbins-Monro", wp.equilibrium.RobbinsMonro(0.2))):
    for window in windows:
        deq.solver, deq.stop = (
            solver,
            wp.MeanRelative(0.0, window=window),
        )  # never accepts: 60 steps, then the mean
        errors[name].append(error(deq(u)))
    print(name, [f"{value:.3f}" for value in errors[name]])

# %%
figure, axes = pyplot.subplots(figsize=(5, 3), layout="constrained")
for name, values in errors.items():
    axes.loglog(windows, values, marker="o", label=name)
axes.set(xlabel="iterates in the mean", ylabel="relative error", xticks=windows, xticklabels=windows)
axes.legend(frameon=False)
figure.savefig("live_with_noise.png", dpi=120)
