# %% [markdown]
# # Keep, share and ship a model
#
# A model is kept as one file, shared as a folder in the conventions of the Hugging Face hub, and shipped as an
# ONNX program. All of it is tensors and text: reading it runs no code.
#
# The last step needs `pip install 'wellposed[share]'`.

# %%
from pathlib import Path

import onnxruntime
import torch

import wellposed as wp
from wellposed.models import load_reference, reference_models

for card in reference_models().values():
    print(f"{card.name:22} {card.parameters:7,} numbers  {card.title}")

# %%
model = load_reference("digits-robust")
wp.save(model, "model.safetensors")
again = wp.load("model.safetensors")

wp.save(model, "folder/", card="Reads digits of 8 x 8 pixels in [0, 1].")
shared = wp.load("folder")
u = torch.rand(16, 64, generator=torch.Generator().manual_seed(0))
same = torch.equal(again(u), model(u)) and torch.equal(shared(u), model(u))
print(sorted(path.name for path in Path("folder").iterdir()), "outputs identical:", same)
print(Path("folder/README.md").read_text())

# %% [markdown]
# ONNX knows no "until it converges". `export_onnx` writes a fixed number of plain steps; with kappa = 0.5 each of
# them at least halves the error. The model itself stops at a relative residual of 1e-5.

# %%
differences = {}
for steps in (5, 10, 20):
    wp.export_onnx(model, "model.onnx", u, steps=steps)
    session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {session.get_inputs()[0].name: u.numpy()})
    differences[steps] = float((torch.from_numpy(output) - model(u).detach()).abs().max())
    print(f"{steps} steps: outputs differ by {differences[steps]:.1e}")
