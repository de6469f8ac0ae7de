# %% [markdown]
# # A first implicit model
#
# An implicit model has no layers. Its state solves one equation, `x = relu(Ax + Bu + b)`, and its output is `Cx +
# Du`. Here one learns to read handwritten digits, and proves that each image has exactly one state.
#
# Needs `pip install 'wellposed[plots,sklearn]'` (scikit-learn for the data, matplotlib for the picture).

# %%
import torch
from matplotlib import pyplot
from torch.nn.functional import cross_entropy

import wellposed as wp
from wellposed.data import load_images

torch.manual_seed(0)
train, test = load_images("digits", "train"), load_images("digits", "test")
print(len(train), "images to learn from,", len(test), "to test with")

# %% [markdown]
# `kappa` caps the rows of `|A|`. Below 1 the equation is a contraction for every input; the cap holds during
# training because the free parameters are projected, and gradients go through the projection.

# %%
model = wp.ImplicitModel(in_features=64, out_features=10, state_features=48, kappa=0.9, bias=True)
history = wp.fit(
    model,
    (train.flat(), train.labels),
    cross_entropy,
    epochs=15,
    batch_size=64,
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=5e-3),
    schedule="cosine",
    progress=False,
)
print(f"loss {float(history.train_loss[0]):.3f} -> {float(history.train_loss[-1]):.3f}")

# %% [markdown]
# How good is it, how hard were the equations, and how far may a state be from the true one?

# %%
with torch.no_grad():
    solution = model.equilibrium(test.flat())
    accuracy = float((model(test.flat()).argmax(1) == test.labels).double().mean())
print(f"{100 * accuracy:.1f} % of unseen digits are read correctly")
print(solution)
print("distance from the true state: at most", float(solution.error_bound.max()))
print(model.certificate())

# %% [markdown]
# The loss and the steps to the equilibrium, epoch by epoch. As the model learns, its states interact more and the
# equation becomes a little harder.

# %%
figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3), layout="constrained")
left.semilogy(history.train_loss)
left.set(xlabel="epoch", ylabel="cross-entropy")
right.plot(history.steps, color="C1")
right.set(xlabel="epoch", ylabel="steps to equilibrium")
figure.savefig("classify_digits.png", dpi=120)
