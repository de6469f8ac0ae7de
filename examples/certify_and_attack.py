# %% [markdown]
# # What is proven, what is broken, and what is left between
#
# A certificate is a lower bound of robust accuracy: for these images *no* change of the allowed size alters the
# class. An attack is an upper bound: for those images somebody found one. Two classifiers that come with the
# package are compared, one trained as usual, one by bounds on its loss.
#
# Needs `pip install 'wellposed[data,plots,robust,sklearn]'`.

# %%
import torch
from matplotlib import pyplot

from wellposed.data import load_images
from wellposed.models import load_reference, reference_models
from wellposed.robust import Box, certified, output_bounds
from wellposed.robust.attacks import pgd

test = load_images("digits", "test")
u, labels = test.flat()[:100], test.labels[:100]
models = {name: load_reference(name) for name in ("digits", "digits-robust")}
for name in models:
    print(reference_models()[name], end="\n\n")

# %% [markdown]
# Bounds of the outputs first: every pixel may move by 0.02. No image of the box can leave them.

# %%
around = Box.around(u, 0.02)
for name, model in models.items():
    with torch.no_grad():
        bounds = output_bounds(model.form(), around)
        inside = bool(bounds.contains(model(u)).all())
    print(
        f"{name}: outputs within {float(bounds.width.mean()):.2f} on average, by {bounds.method}; inside: {inside}"
    )

# %% [markdown]
# Then the classes, for growing radii. The truth lies between the two curves.

# %%
radii = (0.01, 0.03, 0.05, 0.1)
table: dict[str, list[tuple[float, float]]] = {}
for name, model in models.items():
    rows = []
    for radius in radii:
        proven = certified(model.form(), Box.around(u, radius), labels)
        attacked = pgd(model, u, labels, radius, steps=20)
        assert not bool((proven & attacked.success).any())  # what is proven cannot be broken
        rows.append((float(proven.double().mean()), attacked.accuracy))
        print(f"{name}, every pixel up to {radius}: {rows[-1][0]:.2f} certified, {rows[-1][1]:.2f} under attack")
    table[name] = rows

# %%
figure, axes = pyplot.subplots(figsize=(5.5, 3.2), layout="constrained")
for colour, (name, rows) in zip(("C0", "C1"), table.items(), strict=True):
    proven, broken = zip(*rows, strict=True)
    axes.fill_between(radii, proven, broken, color=colour, alpha=0.2)
    axes.plot(radii, proven, color=colour, marker="o", label=f"{name}: certified")
    axes.plot(radii, broken, color=colour, marker="x", linestyle="--", label=f"{name}: attacked")
axes.set(xlabel="largest change of a pixel", ylabel="accuracy")
axes.legend(frameon=False)
figure.savefig("certify_and_attack.png", dpi=120)
