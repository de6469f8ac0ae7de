# %% [markdown]
# # Nine of ten weights less, with a proof
#
# Record what a trained network computes, and fit an implicit model to its states by convex programs, one for each
# row. Each row comes with a duality gap, the model with a certificate.
#
# Needs `pip install 'wellposed[convex,plots,sklearn]'`.

# %%
import torch
from matplotlib import pyplot
from torch import nn

import wellposed as wp
from wellposed.data import load_images

torch.manual_seed(0)
train, test = load_images("digits", "train"), load_images("digits", "test")
network = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 10))
wp.fit(network, (train.flat(), train.labels), nn.functional.cross_entropy, epochs=12, progress=False)


def accuracy(model: nn.Module) -> float:
    with torch.no_grad():
        return float((model(test.flat()).argmax(1) == test.labels).double().mean())


dense = accuracy(network)
print(f"the network: {dense:.3f}")

# %%
states = wp.record_states(network, train.flat().split(256))
model, report = wp.fit_states(states, kappa=0.9, target_sparsity=0.9, targets=train.labels)
print(report)
sparse = accuracy(model)
gap = float(report.relative_gap.max())
print(f"with {100 * report.sparsity:.0f} % zeros: {sparse:.3f}; largest relative gap {gap:.1e}")

# %% [markdown]
# How far can one go? The same for several shares of zeros, each a fit of its own.

# %%
shares = [0.5, 0.8, 0.9, 0.95, 0.98]
scores = [accuracy(wp.fit_states(states, kappa=0.9, target_sparsity=share)[0]) for share in shares]
for share, score in zip(shares, scores, strict=True):
    print(f"{100 * share:.0f} % zeros: {score:.3f}")

# %%
figure, axes = pyplot.subplots(figsize=(5, 3), layout="constrained")
axes.plot([100 * share for share in shares], scores, marker="o", label="fitted to the states")
axes.axhline(dense, color="grey", linestyle="--", label="the network")
axes.set(xlabel="zeros in A and B (%)", ylabel="accuracy on unseen digits")
axes.legend(frameon=False)
figure.savefig("sparsify_a_network.png", dpi=120)
