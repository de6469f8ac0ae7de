"""How the models that come with the package are trained, and how they are measured."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from wellposed.conditions import certificate
from wellposed.convert import to_implicit
from wellposed.convex import fit_states, record_states
from wellposed.data.images import Images, load_images
from wellposed.errors import unknown_name
from wellposed.forms import ImplicitForm
from wellposed.forms.storage import pack_form
from wellposed.models.implicit import ImplicitModel
from wellposed.models.io.storage import ReferenceModel
from wellposed.models.recurrent import ImplicitRNN
from wellposed.robust import Box, CertifiedLoss, Ramp, certified_accuracy
from wellposed.training import fit
from wellposed.workers import one_thread
from wellposed_lab.networks.by_name import SeriesRNN
from wellposed_lab.tasks.mathematics import Addition
from wellposed_lab.tasks.sequences import RollingArgmax

RADIUS = 0.05  # of the certified classifier, in pixels from 0 to 1
COMMAND = "python examples/train_reference_models.py {name}"
DIGITS = "handwritten digits, 8 x 8 pixels in [0, 1] (UCI, from scikit-learn); of each class every fifth is unseen"
ADDITION = Addition(test_samples=2000)
ARGMAX = RollingArgmax()
Trained = ImplicitModel | ImplicitRNN | ImplicitForm


@dataclass(frozen=True)
class Recipe:
    """How one of the models is made.

    Args:
        title, data, limits: of its card.
        train: returns the trained model; seeded.
        measure: returns what its card says, on unseen data.
    """

    title: str
    data: str
    train: Callable[[], Trained]
    measure: Callable[[Trained], dict[str, float]]
    limits: str = ""

    def card(self, name: str, model: Trained) -> ReferenceModel:
        """Measures a trained model and writes its card."""
        numbers = pack_form(model)[0].values() if isinstance(model, ImplicitForm) else model.parameters()
        count = sum(part.numel() for part in numbers if part.is_floating_point())
        proof = certificate(model.cell(0) if isinstance(model, ImplicitRNN) else model)
        command = COMMAND.format(name=name)
        return ReferenceModel(
            name, self.title, self.data, self.measure(model), str(proof), count, command, self.limits
        )


def train_reference(name: str) -> tuple[Trained, ReferenceModel]:
    """Trains a reference model anew, on one thread and with fixed seeds, and measures it."""
    if name not in RECIPES:
        raise unknown_name("reference model", name, RECIPES)
    with one_thread():
        torch.manual_seed(0)
        model = RECIPES[name].train()
        return model, RECIPES[name].card(name, model)


def _classify(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], epochs: int, flat: bool = True) -> None:
    train = load_images("digits", "train")
    u = train.flat() if flat else train.to_float()
    adam = partial(torch.optim.Adam, lr=5e-3)
    fit(model, (u, train.labels), loss, epochs=epochs, batch_size=64, optimizer=adam, schedule="cosine")


def _digits() -> ImplicitModel:
    model = ImplicitModel(64, 10, 48, kappa=0.9, bias=True)
    _classify(model, cross_entropy, 40)
    return model


def _robust() -> ImplicitModel:
    model = ImplicitModel(64, 10, 64, kappa=0.5, bias=True)
    loss = CertifiedLoss(model, Ramp(RADIUS, steps=600), method="interval")
    _classify(model, loss, 60)
    return model


def _sparse() -> ImplicitModel:
    train = load_images("digits", "train")
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    _classify(network, cross_entropy, 30)
    states = record_states(network, train.flat().split(256))
    model, _ = fit_states(states, kappa=0.9, target_sparsity=0.9, targets=train.labels)
    return model


def _convolutional() -> ImplicitForm:
    network = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24 * 16, 10),
    )
    _classify(network, cross_entropy, 15, flat=False)
    with torch.no_grad():
        return to_implicit(network.eval(), (1, 8, 8))


def _addition() -> ImplicitModel:
    model = ImplicitModel(50, 1, 20, kappa=0.5)
    adam = partial(torch.optim.Adam, lr=0.03)
    fit(model, ADDITION.train(0), mse_loss, epochs=40, batch_size=200, optimizer=adam, schedule="cosine")
    return model


def _argmax() -> ImplicitRNN:
    series = SeriesRNN(ImplicitRNN(1, 22, 21, out_features=10, batch_first=True), "last")
    adam = partial(torch.optim.Adam, lr=0.01)
    fit(series, ARGMAX.train(0), ARGMAX.loss, epochs=40, batch_size=100, optimizer=adam, schedule="cosine")
    return series.rnn


@torch.no_grad()
def _share_right(model: Trained, images: Images) -> float:
    shape = model.input_shape if isinstance(model, ImplicitForm) else (64,)
    return float((model(images.to_float().reshape(-1, *shape)).argmax(1) == images.labels).double().mean())


def _accuracy(model: Trained) -> dict[str, float]:
    return {"accuracy": _share_right(model, load_images("digits", "test"))}


def _certified(model: Trained) -> dict[str, float]:
    test = load_images("digits", "test")
    proven = certified_accuracy(model, Box.around(test.flat(), RADIUS), test.labels)
    return {**_accuracy(model), f"certified accuracy, every pixel up to {RADIUS} off": float(proven)}


def _sparsity(model: Trained) -> dict[str, float]:
    assert isinstance(model, ImplicitModel)
    weights = torch.cat([model.A, model.B], dim=1)
    return {**_accuracy(model), "share of zeros in A and B": float((weights == 0).double().mean())}


@torch.no_grad()
def _errors(model: Trained) -> dict[str, float]:
    errors = {}
    for k in (2.0, 100.0, 1e5):
        u, y = ADDITION.test(0, k)
        error = (model(u) - y).square().mean().sqrt() / y.square().mean().sqrt()
        errors[f"relative error on U(-{k / 2:g}, {k / 2:g})"] = float(error)
    return errors


@torch.no_grad()
def _argmaxes(model: Trained) -> dict[str, float]:
    assert isinstance(model, ImplicitRNN)
    accuracies = {}
    for k in (1.0, 1e5):
        u, y = ARGMAX.test(0, k)
        accuracies[f"accuracy on U(0, {k:g})"] = ARGMAX.score(model(u[:, :, None])[0][:, -1], y)["accuracy"]
    return accuracies


RECIPES: dict[str, Recipe] = {
    "digits": Recipe("Classifies handwritten digits.", DIGITS, _digits, _certified),
    "digits-robust": Recipe(
        f"Classifies handwritten digits, trained by bounds on its loss for pixels up to {RADIUS} off.",
        DIGITS,
        _robust,
        _certified,
    ),
    "digits-sparse": Recipe(
        "Classifies handwritten digits, fitted to the states of a 64-64-32-10 network by convex programs.",
        DIGITS,
        _sparse,
        _sparsity,
    ),
    "digits-convolutional": Recipe(
        "A convolutional network for handwritten digits, converted to an implicit form.",
        DIGITS,
        _convolutional,
        _accuracy,
        "A form is evaluated, analysed and composed; to_model() makes one that trains.",
    ),
    "addition": Recipe(
        "Adds two ranges of 50 numbers (000 section 3).",
        "U(-1, 1), tested on U(-k/2, k/2)",
        _addition,
        _errors,
        "The ranges are those that seed 0 draws. The target is linear: a linear fit does better.",
    ),
    "rolling-argmax": Recipe(
        "Reads ten numbers and says where the largest was (001 section 3).",
        "U(0, 1), tested on U(0, k)",
        _argmax,
        _argmaxes,
        "A logistic regression on the whole sequence does better.",
    ),
}
