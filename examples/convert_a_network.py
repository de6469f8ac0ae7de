# %% [markdown]
# # A trained network as an implicit model
#
# Every feed-forward network is an implicit model with a strictly triangular `A`: list its hidden activations in
# one state. `to_implicit` writes a trained network that way; the outputs are the same.

# %%
import torch
from torch import nn

import wellposed as wp
from wellposed.data import load_images
from wellposed.robust import lipschitz

torch.manual_seed(0)
train, test = load_images("digits", "train"), load_images("digits", "test")
network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10))
wp.fit(network, (train.flat(), train.labels), nn.functional.cross_entropy, epochs=10, progress=False)

# %%
form = wp.to_implicit(network, (64,))
print(form)
with torch.no_grad():
    difference = float((form(test.flat()) - network(test.flat())).abs().max())
print("largest difference of the outputs:", difference)
print(form.certificate())

# %% [markdown]
# As one equation it can be drawn, rescaled, composed and analysed. `rescale` changes the units of the states by
# powers of two until the rows of `|A|` are below `kappa`; not one bit of the output changes.

# %%
small = form.rescale(0.5)
print("rows of |A|:", float(form.A.abs().row_sums().max()), "->", float(small.A.abs().row_sums().max()))
same = torch.equal(small(test.flat()), form(test.flat()))
print("outputs identical:", same)
print("the output moves at most", float(lipschitz(form)), "times as far as the largest change of a pixel")
wp.forms.spy(form, "network.png")

# %% [markdown]
# And it can go on training, now with feedback between all states, from exactly where the network stood.

# %%
model = form.to_model()
with torch.no_grad():
    before = float((model(test.flat()).argmax(1) == test.labels).double().mean())
wp.fit(
    model,
    (train.flat(), train.labels),
    nn.functional.cross_entropy,
    epochs=3,
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    progress=False,
)
with torch.no_grad():
    after = float((model(test.flat()).argmax(1) == test.labels).double().mean())
print(f"accuracy {before:.3f} as converted, {after:.3f} after training with feedback")
print(model.certificate())
