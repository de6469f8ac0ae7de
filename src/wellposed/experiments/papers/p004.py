"""004: Regularizing the Infinite. Its results are plots, so most rows are orders; `at` is the test noise in dB.

A model is named by its size (layers of the FFW, width of the DEQ), then by the noise it was trained with.
"""

from collections.abc import Iterator

from wellposed.experiments.papers.adversarial import adversarial
from wellposed.experiments.papers.row import Row, Sheet
from wellposed.experiments.rules import Measure

WIDTHS = {1: 128, 3: 223, 5: 288, 7: 340, 9: 386, 11: 427, 13: 467}  # layers of the FFW: width of the DEQ
TRAINED = {"": "without noise", "-noise-10db": "with noise of 10 dB", "-noise-0db": "with noise of 0 dB"}

EPOCHS = "004 trains the DEQ for 30 epochs and the FFW for 64; the sizes agree only inside the cell."
INJECTED = (
    "The FFW has no input injection in the analysis and one in the experiments; with it the advantage of the DEQ "
    "mostly vanishes."
)
PLOTTED = "The range of SNRs is only in the plot."
START = "The order depends on how the weights are initialised."


def sizes() -> Iterator[Row]:
    sheet, place = Sheet("004", "parameters"), "section 4.1"
    for layers, width in WIDTHS.items():
        claim = f"The DEQ of width {width} has as many parameters as the FFW of {layers} layers of 128."
        if layers == 13:
            reason = (
                "The smallest square that holds 13 (128^2 + 128) weights has the side 464, by the others' rule."
            )
            yield sheet.excluded(place, claim, width, reason, "width")
            continue
        note = "This is ceil(sqrt(layers (128^2 + 128))), with the biases that the text says were left out."
        note = note if layers > 1 else ""
        yield sheet.count(place, claim, width, Measure("state_width", "deq", "mnist", layers), note)
    yield sheet.excluded(
        "section E.1",
        "DEQ and FFW of every pair have the same number of parameters.",
        1,
        "The input projection grows with the width, so the totals differ by up to 1.86 times.",
    )


def mnist() -> Iterator[Row]:
    sheet = Sheet("004", "noise-mnist")

    def accuracy(model: str) -> Measure:
        return Measure("accuracy", model, "mnist", 0)

    def lead(model: str, at: float = 0) -> Measure:
        return Measure("accuracy_gain", model, "mnist", at)

    claim = "Without training noise the DEQ is not robust: at 0 dB it is less accurate than without noise."
    clean = Measure("accuracy", "deq-128", "mnist")
    yield sheet.order("section 4.1", claim, clean, accuracy("deq-128"), "higher")
    claim = "Without training noise a one-layer FFW is more accurate at 0 dB than the DEQ of its size."
    yield sheet.order("section 4", claim, accuracy("ffw-1"), "deq-128", "higher", note=EPOCHS)
    for panel, figure, noise in zip("abc", (10, 11, 12), TRAINED, strict=True):
        place, trained = f"Figure 1 ({panel})", f"Trained {TRAINED[noise]}"
        for layers in (9, 11, 13):
            claim = f"{trained}, the DEQ is more accurate at 0 dB than an FFW of {layers} layers."
            measure = accuracy(f"deq-{WIDTHS[layers]}{noise}")
            yield sheet.order(place, claim, measure, f"ffw-{layers}{noise}", "higher", note=INJECTED)
        wide, narrow = f"deq-467{noise}", f"deq-128{noise}"
        claim = f"{trained}, the DEQ leads an FFW of 13 layers by more at 0 dB than at 20 dB."
        yield sheet.order(f"Figure {figure}", claim, lead(wide), lead(wide, 20), "higher", note=PLOTTED)
        claim = f"{trained}, the lead of the DEQ over an FFW of its size grows from one layer to 13."
        yield sheet.order(f"Figure {figure}", claim, lead(wide), narrow, "higher", note=INJECTED)
    for noise in ("-noise-10db", "-noise-0db"):
        claim = f"A DEQ trained {TRAINED[noise]} is more accurate at 0 dB than one trained without."
        note = "The caption says a width of 3, read as the width matched to three layers."
        yield sheet.order("Figure 1 (d)", claim, accuracy(f"deq-223{noise}"), "deq-223", "higher", note=note)
        claim = f"Trained {TRAINED[noise]}, the DEQ is more accurate at 0 dB even than a one-layer FFW."
        yield sheet.order("section 5", claim, accuracy(f"deq-128{noise}"), f"ffw-1{noise}", "higher", note=EPOCHS)
    claim = "The DEQ of width 386 is more accurate at 0 dB than an FFW of 9 layers, both with Jacobian penalty."
    note = "The penalty's stop is printed as epoch 55 of 30."
    measure = accuracy("deq-386-jacobian")
    yield sheet.order("Figure 13 (left)", claim, measure, "ffw-9-jacobian", "higher", note=note)


def sensitivity() -> Iterator[Row]:
    sheet = Sheet("004", "noise-mnist")

    def ratio(layers: int) -> Measure:
        return Measure("sensitivity_ratio", f"deq-{WIDTHS[layers]}", "mnist")

    untrained = "The ratio does not predict the noisy accuracy of models trained with noise."
    for layers in (9, 11, 13):
        claim = f"A DEQ is less sensitive to noise in its states than an FFW of {layers} layers, a ratio below 1."
        yield sheet.below("Figure 2 (b)", claim, 1, ratio(layers), note=untrained)
    for few, many in ((1, 5), (5, 9), (9, 13)):
        claim = f"The sensitivity of the DEQ over that of the FFW falls with depth, from {few} to {many} layers."
        yield sheet.order("section 4.1.1", claim, ratio(many), ratio(few), "lower")
    claim = "The DEQ is less sensitive even if the FFW of 9 layers has a Jacobian penalty too."
    measure = Measure("sensitivity", "deq-386", "mnist")
    yield sheet.order("section 4.1.1", claim, measure, "ffw-9-jacobian", "lower")
    claim = "With a Jacobian penalty on both, the DEQ keeps a smaller Jacobian than the FFW of 9 layers."
    note = "What is small is the radius of the Jacobian at the solution; that of the weights is above one."
    measure = Measure("jacobian_radius", "deq-386-jacobian", "mnist")
    yield sheet.order("section 3.3", claim, measure, "ffw-9-jacobian", "lower", note=note)


def solvers() -> Iterator[Row]:
    sheet = Sheet("004", "noise-solvers")

    def residual(solver: str, at: float) -> Measure:
        return Measure("residual", solver, "random-tanh", at)

    for at, panels in ((20, "a, c"), (0, "b, d")):
        place = f"Figure 4 ({panels})"
        claim = f"At {at} dB averaging brings the solver closer to the solution than plain unrolling."
        note = "The printed iteration has its sign wrong; z <- (1 - a) z + a f(z + e) is meant."
        measure = residual("stochastic-unrolling", at)
        yield sheet.order(place, claim, measure, "unrolling", "lower", note=note)
        for name in ("anderson", "broyden"):
            claim = f"At {at} dB {name.title()} needs no explicit averaging to come closer than plain unrolling."
            yield sheet.order(place, claim, residual(name, at), "unrolling", "lower")
    for at, note in ((20, "Judged at a tolerance of 0.05."), (0, "At a tolerance of 0.05 neither rule fires.")):
        claim = f"At {at} dB the averaged rule stops plain unrolling earlier than the relative rule."
        measure = Measure("steps", "unrolling-mean-relative", "random-tanh", at)
        yield sheet.order("Figure 4 (c, d)", claim, measure, "unrolling-relative", "lower", note=note)
    claim = "On MNIST the averaged rule needs fewer iterations than the relative one at a tolerance of 0.01."
    measure = Measure("steps", "deq-128-mean-relative", "mnist", 10)
    yield sheet.order("Figure 5", claim, measure, "deq-128-relative", "lower", note=PLOTTED)


def cifar() -> Iterator[Row]:
    sheet = Sheet("004", "noise-cifar")

    def accuracy(model: str) -> Measure:
        return Measure("accuracy", model, "cifar10", 10)

    claim = "At 10 dB a multiscale DEQ of 4 branches is more accurate than the deepest convolutional FFW."
    note = "The text says only that the results agree with MNIST; the number of layers is not printed."
    yield sheet.order("Figure 1 (e)", claim, accuracy("mdeq-4"), "ffw-conv-4", "higher", note=note)
    note = "The same accuracy is read as at most 2 % less; judged at 10 dB."
    for ours, rival in (("stochastic-unrolling", "broyden"), ("broyden", "stochastic-unrolling")):
        claim = f"Under noise {ours} is as accurate as {rival} in a multiscale DEQ of 4 branches."
        measure = accuracy(f"mdeq-4-{ours}")
        yield sheet.order("Figure 6", claim, measure, f"mdeq-4-{rival}", "higher", factor=0.98, note=note)


def regression() -> Iterator[Row]:
    sheet = Sheet("004", "noise-regression")

    def mse(model: str) -> Measure:
        return Measure("test_mse", model, "bump-regression", 0)

    for figure, projection in ((7, "identity"), (8, "silu"), (9, "relu")):
        for layers in (11,) if projection == "relu" else (3, 11):  # with ReLU shallow FFWs are said to be robust
            claim = f"With {projection} input the DEQ has a lower error at 0 dB than an FFW of {layers} layers."
            measure = mse(f"deq-{WIDTHS[layers]}-{projection}")
            yield sheet.order(
                f"Figure {figure}", claim, measure, f"ffw-{layers}-{projection}", "lower", note=START
            )
    for projection in ("identity", "silu"):
        claim = f"With {projection} input the DEQ has a lower error at 0 dB even than an FFW of one layer."
        measure = mse(f"deq-128-{projection}")
        yield sheet.order("section D.1", claim, measure, f"ffw-1-{projection}", "lower", note=START)
        claim = f"A one-layer FFW is more robust at 0 dB with ReLU input than with {projection} input."
        yield sheet.order("section D.1", claim, mse("ffw-1-relu"), f"ffw-1-{projection}", "lower", note=START)


def algorithms() -> Iterator[Row]:
    sheet, noisy = Sheet("004", "prefix-sums"), "with noise of 0 dB in the state"
    note = "The training length is 32 bits, and 0 dB in the state leaves a DEQ at chance."
    for model in ("deq", "ffw"):
        claim = f"On prefix sums of 512 bits the {model.upper()} is worse {noisy}."
        measure = Measure("accuracy", model, "prefix-sums", 512)
        yield sheet.order("Figure 18 (a)", claim, measure, f"{model}-noise-0db", "higher", note=note)
    claim = f"On the largest mazes, 59 x 59, the DEQ is more accurate than the FFW {noisy}."
    measure = Measure("accuracy", "deq-noise-0db", "mazes", 59)
    note = "The DEQ's block has two convolutions and the FFW's a single hidden layer."
    yield Sheet("004", "mazes").order("Figure 18 (b)", claim, measure, "ffw-noise-0db", "higher", note=note)
    claim = f"Adding matrices of scale 500, the DEQ has a lower error than the FFW {noisy}."
    measure = Measure("test_mse", "deq-noise-0db", "matrix-addition", 500)
    note = "The FFW projects its input through a ReLU and the DEQ does not."
    sheet = Sheet("004", "matrix-addition")
    yield sheet.order("Figure 18 (c)", claim, measure, "ffw-noise-0db", "lower", note=note)


ROWS: tuple[Row, ...] = (
    *sizes(),
    *mnist(),
    *sensitivity(),
    *solvers(),
    *cifar(),
    *regression(),
    *adversarial(),
    *algorithms(),
)
