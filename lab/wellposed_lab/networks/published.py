"""Which network each paper compares with on which task, with its published number of parameters."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from wellposed.errors import unknown_name
from wellposed_lab.networks.mlp import MLP, EikoNet, parameter_count
from wellposed_lab.networks.nalu import INALU, NAC, NALU
from wellposed_lab.networks.recurrent import LSTM, ReLURNN
from wellposed_lab.networks.resnet import ResNet
from wellposed_lab.networks.simple import LinearRegression
from wellposed_lab.networks.transformers import ArgmaxTransformer, ArrayEncoder, ArrayTransformer, SequenceEncoder

Make = Callable[[], nn.Module]


@dataclass(frozen=True)
class Published:
    """One network of one paper, or a control of its size.

    Args:
        size: the paper whose sizes are used.
        make: builds the network.
        parameters: the number that the paper prints; None where it prints none.
        note: why ours differs, or what to know of it.
    """

    task: str
    model: str
    size: str
    make: Make
    parameters: int | None = None
    note: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """Task, model and size."""
        return self.task, self.model, self.size


@dataclass(frozen=True)
class ParameterRow:
    """A published number of parameters beside ours."""

    task: str
    model: str
    size: str
    published: int | None
    ours: int
    note: str

    @property
    def matches(self) -> bool | None:
        """Whether the numbers agree; None where nothing was published."""
        return None if self.published is None else self.published == self.ours


def build(task: str, model: str, size: str = "001") -> nn.Module:
    """Builds a comparator: the network of that paper on that task, or a control of its size.

    Inputs and outputs: identity (B, 10) -> (B, 10), addition and subtraction (B, 50) -> (B, 1),
    rolling-average (B, 10) -> (B, 10), rolling-argmax (B, 10) -> (B, 10) logits of the last step, spiky
    (B, 10) -> (B, 1), volatility (B, 60) -> (B, 1), earthquake (B, 30) -> (B, 4), cifar10 (B, 3, 32, 32) ->
    (B, 10).

    Example:
        >>> parameter_count(build("earthquake", "eikonet"))
        42500
        >>> build("adition", "nalu")
        Traceback (most recent call last):
            ...
        wellposed.errors.UnknownNameError: unknown task 'adition'; valid: addition, ...; did you mean 'addition'?
    """
    _require("task", task, {entry.task for entry in PUBLISHED.values()})
    of_task = [entry for entry in PUBLISHED.values() if entry.task == task]
    _require(f"model of the task {task!r}", model, {entry.model for entry in of_task})
    sizes = {entry.size for entry in of_task if entry.model == model}
    _require(f"size of {model!r} on {task!r}", size, sizes)
    return PUBLISHED[task, model, size].make()


def parameter_table() -> list[ParameterRow]:
    """Compares every network with what its paper prints.

    Example:
        >>> rows = parameter_table()
        >>> [row.model for row in rows if row.matches is False and row.task == "addition"]
        ['mlp']
    """
    return [
        ParameterRow(*entry.key, entry.parameters, parameter_count(entry.make()), entry.note)
        for entry in PUBLISHED.values()
    ]


def _require(kind: str, name: str, valid: set[str]) -> None:
    if name not in valid:
        raise unknown_name(kind, name, valid)


EARLY, LATE = ("000", "002"), ("001",)  # 000 and 002 report the same networks, 001 others
Row = tuple[tuple[str, ...], str, Make] | tuple[tuple[str, ...], str, Make, int | None, str]


def _entries(task: str, rows: list[Row]) -> list[Published]:
    return [Published(task, row[1], size, *row[2:]) for row in rows for size in row[0]]


def _identity() -> list[Published]:
    narrow = "narrower than its input, so it must lose a dimension; 'mlp-wide' does not"
    lone = "the encoder layer alone, the array its one token"
    rows: list[Row] = [
        (EARLY, "mlp", partial(MLP, (10, 10, 10)), 220, ""),
        (LATE, "mlp", partial(MLP, (10, 9, 9, 10)), None, narrow),
        (LATE, "mlp-wide", partial(MLP, (10, 10, 10, 10))),
        ((*EARLY, *LATE), "mlp-bias-free", partial(MLP, (10, 20, 20, 10), bias=False)),
        (EARLY, "mlp-skip", partial(MLP, (10, 10, 10), skip=True)),
        (LATE, "mlp-skip", partial(MLP, (10, 9, 9, 10), skip=True)),
        ((*EARLY, *LATE), "linear", partial(LinearRegression, 10, 10)),
        (EARLY, "transformer-encoder-single-head", partial(ArrayEncoder, 10), 43498, lone),
        (LATE, "transformer-5-heads", partial(ArrayTransformer, 10)),
    ]
    return _entries("identity", rows)


def _arithmetic(task: str) -> list[Published]:
    sizes, shapes_only = (50, 10, 10, 1), ("000", "001")  # 000 prints counts for the other tasks only
    mlp = "printed as 50x10x10x1, which has 631"
    nalu = "printed as 50x10x10x1, which has 1,830; the count is that of 50x10x1"
    constant = (
        "the count is that of width 1, which 10 heads do not divide; its output does not depend on its input"
    )
    sequential = partial(SequenceEncoder, 50, 1, width=1)
    wide = partial(SequenceEncoder, 50, 1, width=10, heads=10, feedforward=50)
    depthwise = partial(ArrayEncoder, 50, 1)
    rows: list[Row] = [
        (("002",), "mlp", partial(MLP, sizes), 1497, mlp),
        (shapes_only, "mlp", partial(MLP, sizes)),
        ((*EARLY, *LATE), "mlp-bias-free", partial(MLP, sizes, bias=False)),
        ((*EARLY, *LATE), "mlp-skip", partial(MLP, sizes, skip=True)),
        ((*EARLY, *LATE), "linear", partial(LinearRegression, 50, 1)),
        (("002",), "nalu", partial(NALU, (50, 10, 1)), 1530, nalu),
        (shapes_only, "nalu", partial(NALU, sizes)),
        (("002",), "nac", partial(NAC, (50, 10, 1))),
        (shapes_only, "nac", partial(NAC, sizes)),
        (("002",), "inalu", partial(INALU, (50, 10, 1))),
        (shapes_only, "inalu", partial(INALU, sizes)),
        (("002",), "transformer-encoder-sequential", sequential, 6208, constant),
        (("000",), "transformer-encoder-sequential", sequential, None, f"that of 002: {constant}"),
        (LATE, "transformer-encoder-sequential", wide, None, "width 10, the least that 10 heads divide"),
        (("002",), "transformer-encoder-depthwise", depthwise, 217349, ""),
        (("000",), "transformer-encoder-depthwise", depthwise),
        (LATE, "transformer-encoder-depthwise", partial(depthwise, feedforward=500)),
    ]
    return _entries(task, rows)


def _rolling_average() -> list[Published]:
    ten = "printed as 1x100x100x1; the count has 10 outputs, all averages at the last step"
    copied = "the published number is the LSTM's; a layer of width 10 has 43,498"
    early, late = partial(LSTM, 1, 100, 10), partial(LSTM, 1, 18, 1, output="sequence")
    rows: list[Row] = [
        (EARLY, "lstm", early, 42210, ten),
        (LATE, "lstm", late),
        (EARLY, "lstm-normalised", partial(early, normalise="first")),
        (LATE, "lstm-normalised", partial(late, normalise="first")),
        (EARLY, "rnn-relu", partial(ReLURNN, 1, 200, 10)),
        (LATE, "rnn-relu", partial(ReLURNN, 1, 38, 1, output="sequence")),
        ((*EARLY, *LATE), "linear", partial(LinearRegression, 10, 10)),
        (EARLY, "transformer-encoder", partial(ArrayEncoder, 10, heads=2), 42210, copied),
        (LATE, "transformer-5-heads", partial(ArrayTransformer, 10, 10)),
    ]
    return _entries("rolling-average", rows)


def _rolling_argmax() -> list[Published]:
    early, late = partial(LSTM, 1, 19, 10), partial(LSTM, 1, 21, 10)
    normalised = {"normalise": "max", "restore": False}
    leak = "sees at each step but the last the label of that step"
    unmasked = partial(ArgmaxTransformer, masked=False)
    rows: list[Row] = [
        (EARLY, "lstm", early, 1872, ""),
        (LATE, "lstm", late),
        (EARLY, "lstm-normalised", partial(early, **normalised)),
        (LATE, "lstm-normalised", partial(late, **normalised)),
        (EARLY, "rnn-relu", partial(ReLURNN, 1, 38, 10)),
        (LATE, "rnn-relu", partial(ReLURNN, 1, 42, 10)),
        ((*EARLY, *LATE), "linear", partial(LinearRegression, 10, 10, intercept=False)),
        (EARLY, "transformer-decoder-masked", ArgmaxTransformer, 1920, ""),
        (LATE, "transformer-decoder-masked", ArgmaxTransformer),
        (EARLY, "transformer-decoder-unmasked", unmasked, 1920, leak),
        (LATE, "transformer-decoder-unmasked", unmasked, None, leak),
        (LATE, "transformer-no-position", partial(unmasked, position=False), None, leak),
    ]
    return _entries("rolling-argmax", rows)


def _spiky() -> list[Published]:
    lstm = partial(LSTM, 1, 20, 1)
    transformer = partial(SequenceEncoder, 10, 1, width=10, head="step", causal=True)
    rows: list[Row] = [
        (EARLY, "lstm", lstm, 1861, ""),
        (LATE, "lstm", lstm),
        ((*EARLY, *LATE), "lstm-normalised", partial(lstm, normalise="first")),
        ((*EARLY, *LATE), "rnn-relu", partial(ReLURNN, 1, 42, 1)),
        ((*EARLY, *LATE), "linear", partial(LinearRegression, 10, 1)),
        (EARLY, "transformer-spiky", partial(transformer, heads=10), 43529, ""),
        (LATE, "transformer-spiky", partial(transformer, heads=2)),
    ]
    return _entries("spiky", rows)


def _volatility() -> list[Published]:
    sizes = (60, 50, 27, 27, 27, 10, 1)
    constant = "width 1: its output does not depend on its input; 'transformer-encoder' is the control"
    usable = partial(SequenceEncoder, 60, 1, width=10, heads=2, feedforward=240)
    rows: list[Row] = [
        (LATE, "mlp", partial(MLP, sizes)),
        (LATE, "mlp-bias-free", partial(MLP, sizes, bias=False)),
        (LATE, "mlp-skip", partial(MLP, sizes, skip=True)),
        (LATE, "linear", partial(LinearRegression, 60, 1)),
        (LATE, "linear-sgd", partial(LinearRegression, 60, 1)),
        (LATE, "lstm", partial(LSTM, 1, 38, 1)),
        (LATE, "lstm-normalised", partial(LSTM, 1, 38, 1, normalise="first", restore=False)),
        (LATE, "rnn-relu", partial(ReLURNN, 1, 78, 1)),
        (LATE, "transformer-volatility", partial(SequenceEncoder, 60, 1, width=1), None, constant),
        (LATE, "transformer-encoder", usable, None, "a control of width 10 with as many parameters"),
    ]
    return _entries("volatility", rows)


def _earthquake() -> list[Published]:
    inputs = "printed with 270 inputs, which has 50,180; the count is that of 30"
    rows: list[Row] = [
        (("001", "002"), "eikonet", EikoNet, 42500, inputs),
        (("001", "002"), "eikonet-skip", partial(EikoNet, skip=True)),
        (("001", "002"), "linear", partial(LinearRegression, 30, 4)),
    ]
    return _entries("earthquake", rows)


def _cifar10() -> list[Published]:
    rows: list[Row] = [
        (("003",), "resnet20", ResNet, None, "0.27 million in He et al. 2016; with projections 272,474")
    ]
    return _entries("cifar10", rows)


def _catalogue() -> list[Published]:
    arithmetic = [*_arithmetic("addition"), *_arithmetic("subtraction")]
    sequences = [*_rolling_average(), *_rolling_argmax(), *_spiky(), *_volatility()]
    return [*_identity(), *arithmetic, *sequences, *_earthquake(), *_cifar10()]


PUBLISHED: dict[tuple[str, str, str], Published] = {entry.key: entry for entry in _catalogue()}
"""Every comparator by (task, model, size), the size named after the paper."""
