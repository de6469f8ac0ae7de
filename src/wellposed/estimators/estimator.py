"""What the estimators have in common: parameters, fit, partial_fit, attributes of a fitted one, save and load.

`train` trains a network on arrays by `wellposed.fit`. `write_estimator` and `read_estimator` store a fitted
estimator as one safetensors file: tensors and text, no pickle. `Estimator` is the base class.
"""

import abc
import json
import os
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from rich.console import Console
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.optim import AdamW, Optimizer

from wellposed.atomic import atomic_write
from wellposed.conditions.certificate import Certificate
from wellposed.conditions.rounding import upward
from wellposed.errors import FileFormatError, InputError, require
from wellposed.estimators.inputs import Array, Inputs, Network, Scaling
from wellposed.models.implicit import ImplicitModel
from wellposed.models.io.files import as_format_error, checksum, write_tensors
from wellposed.models.recurrent import ImplicitRNN
from wellposed.robust.sensitivity import sensitivity
from wellposed.training import History, fit
from wellposed.training.loop import OnEpoch, summary
from wellposed.training.run import Loss
from wellposed.training.team import find_device

SMALLEST_BATCH, UPDATES = 200, 100  # rows of a batch, unless an epoch would then take more updates than this
PRIOR, LARGEST_DECAY = (
    300.0,
    3.0,
)  # weight decay times samples, up to a limit; chosen by benchmarks.package.estimators
MIN_SAMPLES_TO_VALIDATE = 10_000
PREDICT_BATCH = 8192


@dataclass(frozen=True)
class TrainingData:
    """Standardised inputs with targets, whose last column is the weight of the sample.

    Example:
        >>> TrainingData.of(np.ones((2, 3)), np.zeros((2, 1)), np.array([1.0, 3.0])).targets
        tensor([[0.0000, 0.5000],
                [0.0000, 1.5000]], dtype=torch.float64)
    """

    inputs: Tensor  # (N, p) or (N, T, p)
    targets: Tensor  # (N, k + 1)

    @classmethod
    def of(cls, inputs: Array, targets: Array, weights: Array) -> "TrainingData":
        """Joins arrays; weights are divided by their mean."""
        dtype = torch.float32 if inputs.dtype == np.float32 else torch.float64
        columns = np.concatenate([targets, (weights / weights.mean())[:, None]], axis=1)
        return cls(torch.tensor(inputs, dtype=dtype), torch.tensor(columns, dtype=dtype))

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        return self.inputs, self.targets

    def subset(self, rows: np.ndarray) -> "TrainingData":
        """Takes some of the samples, with weights whose mean is one again."""
        index = torch.as_tensor(rows)
        inputs, targets = self.inputs[index], self.targets[index]
        targets[:, -1] /= targets[:, -1].mean()
        return TrainingData(inputs, targets)


def make_optimizer(network: Network, rate: float, decay: float) -> Optimizer:
    """Returns Adam with decoupled weight decay; vectors, and a D that starts at a linear model, have none."""
    matrices = [value for value in network.parameters() if value.dim() > 1 and value is not network.linear]
    others = [value for value in network.parameters() if value.dim() == 1 or value is network.linear]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return AdamW(groups, lr=rate, fused=True)


def batch_rows(wanted: int | str, samples: int) -> int:
    """Returns the rows of a batch; ``"auto"``: 200, more where an epoch would take over a hundred updates.

    Example:
        >>> batch_rows("auto", 150), batch_rows("auto", 20_000), batch_rows("auto", 60_000), batch_rows(64, 150)
        (150, 200, 600, 64)
    """
    if wanted == "auto":
        return min(samples, max(SMALLEST_BATCH, samples // UPDATES))
    if not isinstance(wanted, int | np.integer) or wanted < 1:
        raise InputError(f"batch_size must be a positive integer or 'auto'; received {wanted!r}")
    return min(int(wanted), samples)


def decay_rate(wanted: float | str, samples: int) -> float:
    """Returns the weight decay; ``"auto"``: 300 / samples, at most 3.

    Example:
        >>> decay_rate("auto", 50), decay_rate("auto", 600), decay_rate(0.1, 50)
        (3.0, 0.5, 0.1)
    """
    if wanted == "auto":
        return min(LARGEST_DECAY, PRIOR / samples)
    if not isinstance(wanted, float | int) or wanted < 0:
        raise InputError(f"weight_decay must be a number that is not negative, or 'auto'; received {wanted!r}")
    return float(wanted)


def stops_early(wanted: bool | str, samples: int) -> bool:
    """Returns whether samples are set aside for validation; ``"auto"``: if there are over 10 000.

    Example:
        >>> stops_early("auto", 500), stops_early("auto", 50_000), stops_early(True, 500)
        (False, True, True)
    """
    if not isinstance(wanted, bool | np.bool_) and wanted != "auto":
        raise InputError(f"early_stopping must be True, False or 'auto'; received {wanted!r}")
    return samples > MIN_SAMPLES_TO_VALIDATE if wanted == "auto" else bool(wanted)


def line_printer(epochs: int) -> OnEpoch | None:
    """Returns what prints about ten lines over a training run; None on a terminal, where a bar shows the same."""
    if Console(stderr=True).is_interactive:
        return None

    def report(history: History) -> None:
        if len(history) % max(1, epochs // 10) == 0:
            print(f"epoch {len(history)}/{epochs}: {summary(history)}", flush=True)

    return report


def train(
    network: Network,
    samples: TrainingData,
    loss: Loss,
    optimizer: Optimizer,
    *,
    epochs: int,
    cosine: bool,
    batch_size: int,
    seed: int,
    device: torch.device,
    validation: TrainingData | None = None,
    patience: int | None = None,
    verbose: bool = False,
) -> History:
    """Trains in place and leaves everything on the CPU, where it can be stored."""
    network.to(device)
    optimizer.load_state_dict(optimizer.state_dict())  # which moves the moments to the parameters
    try:
        return fit(
            network,
            samples.pair,
            loss,
            epochs=epochs,
            optimizer=optimizer,
            schedule="cosine" if cosine else None,
            batch_size=batch_size,
            validation=None if validation is None else validation.pair,
            patience=patience,
            device=device,
            seed=seed,
            progress=verbose,
            on_epoch=line_printer(epochs) if verbose else None,
        )
    finally:
        network.cpu()
        optimizer.load_state_dict(optimizer.state_dict())


@torch.no_grad()
def outputs(network: Network, inputs: Array, device: torch.device) -> Array:  # (N, q)
    """Computes what a network says about standardised inputs."""
    u = torch.tensor(inputs, dtype=network.offset.dtype)
    network.to(device)
    try:
        batches = [network(rows.to(device)).cpu() for rows in u.split(PREDICT_BATCH)]
    finally:
        network.cpu()
    return torch.cat(batches).numpy()


FORMAT = "wellposed-estimator-1"


def write_estimator(path: str | os.PathLike[str], tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Writes tensors and what describes them, atomically."""
    try:
        text = json.dumps(state)
    except TypeError as error:
        raise InputError(f"{error}; set random_state to an integer or None before saving") from error
    values = {name: value.detach().contiguous() for name, value in tensors.items()}
    with atomic_write(path) as temporary:
        write_tensors(temporary, values, {"format": FORMAT, "state": text, "sha256": checksum(text, values)})


def read_estimator(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads the file of an estimator of that class."""
    name = os.fspath(path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no estimator file at {name!r}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise FileFormatError(f"{name!r} is not a safetensors file or is damaged: {error}") from error
    if metadata.get("format") != FORMAT:
        raise FileFormatError(f"{name!r} is not an estimator: format {metadata.get('format')!r}, not {FORMAT!r}")
    sealed = metadata.get("sha256")  # older files have none
    if sealed is not None and sealed != checksum(metadata.get("state", ""), tensors):
        raise FileFormatError(f"{name!r} is damaged: its checksum does not match; fit the estimator again")
    with as_format_error(f"{name!r} is damaged"):
        state: dict[str, Any] = json.loads(metadata["state"])
        stored_kind = state["kind"]
    if stored_kind != kind:
        raise FileFormatError(f"{name!r} holds {stored_kind}; use {stored_kind}.load")
    return tensors, state


base = require("sklearn.base", extra="sklearn")
selection = require("sklearn.model_selection", extra="sklearn")
checks = require("sklearn.utils.validation", extra="sklearn")
random = require("sklearn.utils", extra="sklearn")

FITTED = ("n_features_in_", "n_iter_", "n_steps_", "loss_curve_", "validation_curve_", "_shape", "_seed", "_decay")


class Estimator(base.BaseEstimator, abc.ABC):  # type: ignore[name-defined]
    """Learns ``y = Cx + Du + c`` with ``x = phi(Ax + Bu + b)`` from arrays; see `ImplicitRegressor`."""

    _inputs: Inputs

    def __init__(
        self,
        state_features: int = 32,
        *,
        kappa: float = 0.5,
        activation: str = "relu",
        weight_decay: float | str = "auto",
        max_epochs: int = 40,
        batch_size: int | str = "auto",
        learning_rate: float = 5e-2,
        early_stopping: bool | str = "auto",
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 20,
        random_state: Any = None,
        device: str = "auto",
        verbose: bool = False,
    ) -> None:
        self.state_features = state_features
        self.kappa = kappa
        self.activation = activation
        self.weight_decay = weight_decay
        self.max_epochs = max_epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    @abc.abstractmethod
    def _read(self, X: Any, y: Any, reset: bool) -> tuple[Array, np.ndarray]:
        """Checks what the user gave and returns arrays."""

    @abc.abstractmethod
    def _define_targets(self, y: np.ndarray, weights: Array) -> int:
        """Takes note of the classes or the units of y; returns the outputs that the network needs."""

    @abc.abstractmethod
    def _encode(self, y: np.ndarray) -> Array:  # (N, k)
        """Expresses targets as the loss wants them."""

    @abc.abstractmethod
    def _loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Averages over samples; the last column of the targets is their weight."""

    @abc.abstractmethod
    def _linear_model(self, X: Array, targets: Array, weights: Array) -> tuple[Array, Array]:  # (q, p), (q,)
        """Fits a linear model to standardised data; returns its matrix and its offset."""

    @abc.abstractmethod
    def _strata(self, y: np.ndarray) -> np.ndarray | None:
        """Returns the labels that a validation split keeps in proportion; None: it is drawn at random."""

    @abc.abstractmethod
    def _target_state(self) -> dict[str, Any]:
        """Returns the classes or the scaling of y as JSON can hold them."""

    @abc.abstractmethod
    def _restore_targets(self, state: dict[str, Any]) -> int:
        """Takes over what `_target_state` returned; returns the outputs of the network."""

    @property
    @abc.abstractmethod
    def _output_scale(self) -> Array:  # (q,)
        """The unit of every output."""

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learns from scratch.

        Args:
            X: ``(samples, features)``, of sequences ``(samples, time, features)``. A sparse matrix is made dense.
            y: ``(samples,)`` or, in regression, ``(samples, outputs)``.
            sample_weight: ``(samples,)``; a weight of two counts as the sample twice, zero as not at all.
        """
        X, y, weights = self._weighted(X, y, sample_weight, reset=True)
        self._begin(X, y, weights)
        samples = TrainingData.of(self._scaling.standardise(X), self._encode(y), weights)
        validation, patience = None, None
        if stops_early(self.early_stopping, len(y)):
            samples, validation = self._split(samples, y)
            patience = self.n_iter_no_change
        if self.network_.linear is not None:
            columns = samples.targets.numpy()
            D, offset = self._linear_model(samples.inputs.numpy(), columns[:, :-1], columns[:, -1])
            self.network_.start_linear(torch.as_tensor(D), torch.as_tensor(offset))
        self._train(samples, epochs=self.max_epochs, cosine=True, validation=validation, patience=patience)
        return self

    def _train_one_epoch(self, X: Any, y: Any, sample_weight: Any) -> Self:
        """Takes one more epoch, on these samples alone."""
        first = not hasattr(self, "network_")
        X, y, weights = self._weighted(X, y, sample_weight, reset=first)
        if first:
            self._begin(X, y, weights)
        samples = TrainingData.of(self._scaling.standardise(X), self._encode(y), weights)
        self._train(samples, epochs=1, cosine=False)
        return self

    def _weighted(self, X: Any, y: Any, sample_weight: Any, reset: bool) -> tuple[Array, np.ndarray, Array]:
        self._check_parameters()
        X, y = self._read(X, y, reset)
        weights = checks._check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        weights = weights * self._class_weights(y)
        positive = weights > 0
        return (X, y, weights) if positive.all() else (X[positive], y[positive], weights[positive])

    def _class_weights(self, y: np.ndarray) -> Array | float:
        """Returns the factors of sample weights by class."""
        return 1.0

    def _begin(self, X: Array, y: np.ndarray, weights: Array) -> None:
        """Makes a new network for these data."""
        count = self._define_targets(y, weights)
        generator = random.check_random_state(self.random_state)
        seed, self._seed = (int(value) for value in generator.randint(2**31 - 1, size=2))
        self._scaling = Scaling.of(X, weights)
        self._shape = X.shape[1:]
        self._decay = decay_rate(self.weight_decay, len(X))
        self._make_network(count, torch.float32 if X.dtype == np.float32 else torch.float64, seed)
        self.loss_curve_: list[float] = []
        self.validation_curve_: list[float] = []

    def _make_network(self, count: int, dtype: torch.dtype, seed: int) -> None:
        """Makes a network with random values; torch's global generator is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            build, sizes = self._inputs.build, (self._shape[-1], count, self.state_features)
            network = build(*sizes, kappa=self.kappa, activation=self.activation)
        self.network_ = network.to(dtype)
        self.optimizer_ = make_optimizer(self.network_, self.learning_rate, self._decay)

    def _split(self, samples: TrainingData, y: np.ndarray) -> tuple[TrainingData, TrainingData]:
        """Sets samples aside for early stopping."""
        strata, rows = self._strata(y), np.arange(len(y))
        held_out = int(np.ceil(self.validation_fraction * len(y)))
        if strata is not None:
            counts = np.unique(strata, return_counts=True)[1]
            strata = None if counts.min() < 2 or held_out < len(counts) else strata
        train_rows, validation_rows = selection.train_test_split(
            rows, test_size=self.validation_fraction, stratify=strata, random_state=self._seed
        )
        return samples.subset(train_rows), samples.subset(validation_rows)

    def _train(
        self,
        samples: TrainingData,
        *,
        epochs: int,
        cosine: bool,
        validation: TrainingData | None = None,
        patience: int | None = None,
    ) -> None:
        history = train(
            self.network_,
            samples,
            self._loss,
            self.optimizer_,
            epochs=epochs,
            cosine=cosine,
            batch_size=batch_rows(self.batch_size, len(samples.inputs)),
            seed=self._seed + len(self.loss_curve_),
            device=find_device(self.device),
            validation=validation,
            patience=patience,
            verbose=bool(self.verbose),
        )
        self.loss_curve_ += history.train_loss.tolist()
        self.validation_curve_ += history.validation_loss.tolist()
        self.n_iter_ = len(self.loss_curve_)
        best = len(history) - 1 if history.best_epoch is None else int(history.best_epoch)
        self.n_steps_ = float(history.steps[best])

    def _outputs(self, X: Any) -> Array:  # (N, q), standardised
        checks.check_is_fitted(self)
        X = self._inputs.read(self, X)
        return outputs(self.network_, self._scaling.standardise(X), find_device(self.device))

    @property
    def model_(self) -> ImplicitModel | ImplicitRNN:
        """The trained module; inputs and outputs are standardised."""
        checks.check_is_fitted(self)
        return self.network_.body

    @property
    def certificate_(self) -> Certificate:
        """The proof that every input has exactly one equilibrium."""
        checks.check_is_fitted(self)
        return self.network_.cell.certificate()

    @property
    def sensitivity_(self) -> Array:  # (q, p), of sequences (q, T, p)
        """The matrix S with ``|f(u) - f(u')| <= S |u - u'|`` for all inputs, in the units of the data.

        f is the prediction of a regressor and the decision function of a classifier. Times the spread of
        every feature it says which features can matter most; of sequences, those of the length seen in `fit`.
        """
        checks.check_is_fitted(self)
        shape = None if len(self._shape) == 1 else self._shape
        S = sensitivity(self._inputs.readout(self.network_), shape)  # (q, p) or (q, T p)
        scales = np.broadcast_to(self._scaling.scale, self._shape).reshape(-1)
        S = upward(S * torch.tensor(self._output_scale[:, None] / scales), 2)
        return S.numpy().reshape(len(self._output_scale), *self._shape)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the fitted estimator to one safetensors file; `load` reads it and runs no code of the file."""
        checks.check_is_fitted(self)
        state = {name: getattr(self, name) for name in FITTED}
        parameters = self.get_params()
        if isinstance(weights := parameters.get("class_weight"), dict):  # JSON has texts as keys only
            parameters["class_weight"] = [[np.asarray(label).item(), weights[label]] for label in weights]
        state |= {"kind": type(self).__name__, "parameters": parameters, "targets": self._target_state()}
        state |= {"mean": self._scaling.mean.tolist(), "scale": self._scaling.scale.tolist()}
        names = getattr(self, "feature_names_in_", None)
        state["names"] = None if names is None else names.tolist()
        write_estimator(path, self.network_.state_dict(), state)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads what `save` has written; `partial_fit` goes on from there with a fresh optimiser."""
        tensors, state = read_estimator(path, cls.__name__)
        with as_format_error(f"{os.fspath(path)!r} is damaged"):
            parameters = state["parameters"]
            if isinstance(parameters.get("class_weight"), list):
                parameters["class_weight"] = dict(parameters["class_weight"])
            estimator = cls(**parameters)
            for name in FITTED:
                setattr(estimator, name, state[name])
            estimator._shape = tuple(estimator._shape)
            estimator._scaling = Scaling(np.array(state["mean"]), np.array(state["scale"]))
            if state["names"] is not None:
                estimator.feature_names_in_ = np.array(state["names"], dtype=object)
            estimator._check_size(tensors)
            estimator._make_network(estimator._restore_targets(state["targets"]), tensors["offset"].dtype, 0)
            estimator.network_.load_state_dict(tensors)
        return estimator

    def _check_size(self, tensors: dict[str, Tensor]) -> None:
        """Refuses parameters that ask for a larger network than the file holds."""
        states, stored = int(self.state_features), sum(value.numel() for value in tensors.values())
        if states * max(states, int(self._shape[-1])) > stored:
            raise FileFormatError(
                f"{states} states and {self._shape[-1]} inputs do not fit {stored} stored numbers"
            )

    def _check_parameters(self) -> None:
        find_device(self.device)
        for name in ("state_features", "max_epochs", "n_iter_no_change"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name} must be a positive integer; received {value!r}")
        for name, low, high in (("learning_rate", 0, np.inf), ("validation_fraction", 0, 1), ("kappa", 0, 1)):
            value = getattr(self, name)
            if not isinstance(value, float | int) or not low < value < high:
                raise InputError(f"{name} must lie between {low} and {high}; received {value!r}")
