# %% [markdown]
# # A recurrent model that does not mind the scale
#
# `ImplicitRNN` solves one equation at every step of time. Without biases and with ReLU it is positively
# homogeneous: numbers that are a thousand times larger give outputs a thousand times larger, and the same class.
# Here it reads ten numbers and says where the largest was (001 section 3); an LSTM of the same size is there to
# compare.
#
# The task is one of the lab: `make lab`, or `pip install . ./lab` in a checkout.

# %%
import torch
from torch import nn
from wellposed_lab.tasks.sequences import RollingArgmax

import wellposed as wp

task = RollingArgmax(samples=4000, test_samples=1000)
u, y = task.train(seed=0)
print(u[0], "->", int(y[0].argmax()))


# %%
class Reader(nn.Module):
    """The last output of a recurrent layer."""

    def __init__(self, layer: nn.Module, readout: nn.Module) -> None:
        super().__init__()
        self.layer, self.readout = layer, readout

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        return self.readout(self.layer(u[:, :, None])[0][:, -1])


torch.manual_seed(0)
models = {
    "implicit": Reader(wp.ImplicitRNN(1, 22, 21, out_features=10, batch_first=True), nn.Identity()),
    "LSTM": Reader(nn.LSTM(1, 20, batch_first=True), nn.Linear(20, 10)),
}
for model in models.values():
    wp.fit(model, (u, y), task.loss, epochs=15, batch_size=100, schedule="cosine", progress=False)

# %% [markdown]
# Tested on numbers from 0 to k. The first column is what it was trained on.

# %%
scores = {name: {} for name in models}
for name, model in models.items():
    for k in (1.0, 100.0, 1e5):
        inputs, targets = task.test(0, k)
        with torch.no_grad():
            scores[name][k] = task.score(model(inputs), targets)["accuracy"]
    print(name, {f"k = {k:g}": f"{score:.3f}" for k, score in scores[name].items()})

# %% [markdown]
# Every sequence has a status at every step of time, and sequences of different lengths come with their `lengths`.

# %%
rnn = models["implicit"].layer
lengths = torch.randint(3, 11, (8,), generator=torch.Generator().manual_seed(0))
solutions = rnn.equilibria(u[:8, :, None], lengths=lengths)
print(solutions)
print(rnn.explain(u[:8, :, None]))
