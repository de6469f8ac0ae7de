"""The runner: nothing twice, nothing lost, the same numbers after a kill."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
from wellposed_lab.config import Choice, Training
from wellposed_lab.engine import runner
from wellposed_lab.engine.claims import Number, is_sentence, load_claims
from wellposed_lab.engine.experiment import Suite, all_suites, get_suite
from wellposed_lab.engine.run import Context, Run, grouped
from wellposed_lab.engine.runner import CHECKPOINTS, Order, orders, progress_of, run_suite
from wellposed_lab.engine.search import candidates, chosen, search_runs
from wellposed_lab.engine.store import Result, Store, Value
from wellposed_lab.engine.training import TrainingRun, training_runs
from wellposed_lab.tasks.mathematics import Identity

from wellposed.errors import FileFormatError, InputError, NonFiniteLossError, UnknownNameError
from wellposed.training import Checkpoint

SMALL = Identity(samples=60, test_samples=20, points=(10.0,))


def plan(scale):
    models = [
        ("ours", Choice.of("implicit", kappa=0.5)),
        ("baseline", Choice("mlp")),
        ("control", Choice("linear")),
    ]
    return training_runs("small", scale, [SMALL], models, lambda *_: Training(epochs=3, batch_size=20))


SUITE = Suite(
    "small", "", "", (), plan, {"tiny": 2, "default": 3, "paper": 3}, grid=(("learning_rate", (0.001, 0.1)),)
)


def numbers(store):
    """All that a record says except when and where it was made."""
    return {
        record.id: dataclasses.replace(record, environment={}, started="", seconds=0.0).to_json()
        for record in store.records()
    }


UNTRAINABLE = ("persistence", "copy-last-label", "zero", "recent-variance", "rolling-variance")
TRAINED = [name for name, suite in all_suites().items() if isinstance(suite.plan("tiny")[0], TrainingRun)]


@pytest.mark.parametrize("name", TRAINED)
def test_every_suite_runs_at_tiny_scale(name, tmp_path):
    suite = get_suite(name)
    first = {run.labels[:2]: run for run in suite.plan("tiny") if isinstance(run, TrainingRun)}
    cheap = [run for run in first.values() if not run.labels[1].startswith("transformer")]
    quick = dataclasses.replace(suite, plan=lambda scale: cheap)
    state = run_suite(quick, Order(name, "tiny", seeds=1), tmp_path)
    assert state.finished == state.planned == len(cheap) and state.failed == 0
    for record in Store(tmp_path).records():
        run = first[record.task, record.model]
        assert record.suite == name and (record.value("parameters") > 0) == (record.model not in UNTRAINABLE)
        metric = {"rolling-argmax": "accuracy", "volatility-generated": "test_rmse"}.get(record.task, "test_mse")
        assert all(record.value(metric, at) is not None for at in run.task.points)
        assert not run.trained or len(record.series["train_loss"]) == run.training.epochs
        if record.model.startswith("implicit") and not record.model.endswith("-centred"):  # inside another module
            assert record.value("steps", run.task.points[0]) > 1 and "< 1" in record.facts["certificate"]
    assert all(isinstance(text, str) for text in suite.findings(Store(tmp_path).records()))


@pytest.fixture(scope="module")
def sizes(tmp_path_factory):
    """The records of the suite that counts parameters."""
    out = tmp_path_factory.mktemp("parameters")
    run_suite(get_suite("parameters"), Order("parameters", "tiny"), out)
    return Store(out).records()


def test_published_parameter_counts_are_those_of_our_networks(sizes):
    counts = {(r.task, r.model, r.size): r.value("parameters") for r in sizes}
    assert len(counts) > 60
    wrong = []
    for claim in (one for one in load_claims() if one.suite == "parameters" and isinstance(one.rule, Number)):
        measure = claim.rule.measure
        if measure.metric == "parameters" and counts[measure.task, measure.model, measure.size] != claim.value:
            wrong.append((claim.where, measure.task, measure.model))
    # The claims say of themselves that these counts are those of other networks; they are refuted.
    assert [where for where, *_ in wrong] == [(("000", "section 3"), ("002", "Table 1")), (("002", "Table 1"),)]
    assert [names for _, *names in wrong] == [["rolling-average", "transformer-encoder"], ["addition", "mlp"]]


def test_plans_are_consistent():
    for suite in all_suites().values():
        for scale in ("tiny", "default", "paper"):
            runs = suite.runs(scale)
            assert len({run.id for run in runs}) == len(runs) == suite.seeds[scale] * len(suite.plan(scale))
            assert {run.suite for run in runs} == {suite.name} and {run.scale for run in runs} == {scale}
    with pytest.raises(UnknownNameError, match="did you mean 'identity'"):
        get_suite("identiy")
    with pytest.raises(InputError, match="seeds must be at least 1"):
        SUITE.runs("tiny", 0)
    with pytest.raises(UnknownNameError, match="tiny"):
        SUITE.runs("tny")


def test_seeds_of_a_model_run_together_and_every_setting_counts_in_the_id():
    runs = SUITE.runs("tiny", 3)
    sizes = [len(group.runs) for group in grouped(runs)]
    assert sizes == [3, 3, 1, 1, 1]
    run = runs[0]
    assert dataclasses.replace(run, role="control").id == run.id
    changed = dataclasses.replace(run, training=dataclasses.replace(run.training, learning_rate=0.02))
    assert len({run.id, changed.id, run.with_seed(7).id, dataclasses.replace(run, fold=1).id}) == 4


def test_finished_runs_are_skipped(tmp_path):
    lines = []
    run_suite(SUITE, Order("small", "tiny"), tmp_path, tell=lines.append)
    before = Store(tmp_path).path.read_bytes()
    state = run_suite(SUITE, Order("small", "tiny"), tmp_path, tell=lines.append)
    assert Store(tmp_path).path.read_bytes() == before and "6 finished before" in lines[-1]
    assert (state.planned, state.finished, state.failed, state.begun) == (6, 6, 0, 0)
    more = run_suite(SUITE, Order("small", "tiny", seeds=3), tmp_path)
    assert more.finished == 9 and Store(tmp_path).path.read_bytes().startswith(before)
    assert not list((tmp_path / CHECKPOINTS).iterdir())


def test_parallel_runs_give_the_same_numbers(tmp_path):
    run_suite(SUITE, Order("small", "tiny"), tmp_path / "one")
    run_suite(SUITE, Order("small", "tiny"), tmp_path / "two", jobs=2)
    assert numbers(Store(tmp_path / "one")) == numbers(Store(tmp_path / "two"))
    with pytest.raises(InputError, match="jobs must be at least 1"):
        run_suite(SUITE, Order("small", "tiny"), tmp_path, jobs=0)


CHILD = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_runner as t
from wellposed.training import checkpoint
plain = checkpoint.Checkpoint.save
def slow(self, state):
    plain(self, state)
    print("saved", flush=True)
    time.sleep(float(sys.argv[3]))
checkpoint.Checkpoint.save = slow
t.run_suite(t.SUITE, t.Order("small", "tiny"), Path(sys.argv[2]))
"""


def _child(folder, pause):
    here = os.path.dirname(__file__)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-c", CHILD, here, str(folder), str(pause)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, env=environment, text=True)


@pytest.mark.parametrize("saves", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_a_killed_run_resumes_to_the_same_numbers(saves, tmp_path):
    run_suite(SUITE, Order("small", "tiny"), tmp_path / "whole")
    child = _child(tmp_path / "killed", 0.3)
    for _ in range(saves):
        assert child.stdout.readline() == "saved\n"
    time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    state = progress_of(SUITE, Order("small", "tiny"), tmp_path / "killed")
    assert state.finished < state.planned and state.begun == 1
    assert orders(tmp_path / "killed") == [Order("small", "tiny")]
    run_suite(SUITE, Order("small", "tiny"), tmp_path / "killed")
    assert numbers(Store(tmp_path / "killed")) == numbers(Store(tmp_path / "whole"))


ORPHANS = """
import os, sys, time
from wellposed.workers import Workers
def work(common, k):
    print(os.getpid(), flush=True)
    time.sleep(60)
list(Workers(2, sys.argv[1]).run(work, [(1,), (2,)]))
"""


@pytest.mark.parametrize("backend", ["loky", pytest.param("multiprocessing", marks=pytest.mark.slow)])
def test_workers_end_with_the_process_that_started_them(backend):
    parent = subprocess.Popen([sys.executable, "-c", ORPHANS, backend], stdout=subprocess.PIPE, text=True)
    workers = [int(parent.stdout.readline()) for _ in range(2)]
    assert all(_alive(worker) for worker in workers)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 30
    while any(_alive(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_alive(worker) for worker in workers)


def _alive(process):
    """Whether a process is there and no mere entry of one that has ended."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_damaged_checkpoint_stops_the_run_with_a_remedy(tmp_path, monkeypatch):
    plain = Checkpoint.save

    def interrupted(self, state):
        plain(self, state)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_suite(SUITE, Order("small", "tiny"), tmp_path)
    (file,) = (path for path in (tmp_path / CHECKPOINTS).iterdir() if path.suffix == ".ckpt")
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(FileFormatError, match=r"cannot be used.*Delete it"):
        run_suite(SUITE, Order("small", "tiny"), tmp_path)
    file.unlink()
    assert run_suite(SUITE, Order("small", "tiny"), tmp_path).finished == 6


@dataclass(frozen=True, kw_only=True)
class Fragile(Run):
    """Fails for one of its seeds, and for all when they are together."""

    @property
    def labels(self):
        return "task", "fragile", None

    @property
    def batch_seeds(self):
        return True

    def execute(self, runs: Sequence["Fragile"], context):
        if any(run.seed == 1 for run in runs):
            raise NonFiniteLossError("the loss is nan")
        return [Result((Value("test_mse", float(run.seed)),)) for run in runs]


def test_a_seed_that_fails_does_not_take_the_others_along(tmp_path):
    suite = dataclasses.replace(SUITE, plan=lambda scale: [Fragile(suite="small", seed=0, scale=scale)])
    lines = []
    state = run_suite(suite, Order("small", "tiny", seeds=3), tmp_path, tell=lines.append)
    assert (state.finished, state.failed) == (2, 1) and "1 failed: NonFiniteLossError" in lines[-1]
    errors = {record.seed: record.error for record in Store(tmp_path).records()}
    assert errors == {0: None, 1: "NonFiniteLossError: the loss is nan", 2: None}


def test_orders_are_kept_and_read(tmp_path):
    order = Order("small", "tiny", seeds=4, search=True)
    order.save(tmp_path)
    assert orders(tmp_path) == [order]
    assert order.command == "wellposed run small --scale tiny --seeds 4 --search"
    (tmp_path / runner.PLANS / "bad.json").write_text(json.dumps({"suit": 1}))
    with pytest.raises(FileFormatError, match="delete it"):
        orders(tmp_path)


def test_runs_only_what_is_asked_for(tmp_path):
    run_suite(SUITE, Order("small", "tiny"), tmp_path / "all")
    one = Order("small", "tiny", only=("identity/mlp", "lin*"))
    assert one.command == "wellposed run small --scale tiny --only identity/mlp --only 'lin*'"
    state = run_suite(SUITE, one, tmp_path)
    assert state.planned == state.finished == 4
    every, some = numbers(Store(tmp_path / "all")), numbers(Store(tmp_path))
    assert {record["model"] for record in some.values()} == {"mlp", "linear"}
    assert all(every[name] == record for name, record in some.items())
    both = [Order("small", "tiny"), one]
    both[0].save(tmp_path)  # neither takes the other's place
    assert sorted(orders(tmp_path), key=lambda order: order.only) == both
    with pytest.raises(InputError, match="of a task or model 'mpl'; its tasks are 'identity', its models"):
        run_suite(SUITE, Order("small", "tiny", only=("mlp", "mpl")), tmp_path)


def test_search_chooses_by_cross_validation(tmp_path):
    order = Order("small", "tiny", seeds=1, search=True)
    state = run_suite(SUITE, order, tmp_path)
    assert state.planned == state.finished == 2 * 2 * 5 + 3  # two models, two rates, five folds; then the runs
    store = Store(tmp_path)
    folds = [record for record in store.records() if record.kind == "search"]
    assert len(folds) == 20 and all(not any(v.metric == "test_mse" for v in record.values) for record in folds)
    records = store.finished()
    for run in SUITE.runs("tiny", 1)[:2]:
        means = {}
        for candidate in candidates(run, SUITE):
            ids = [dataclasses.replace(candidate, fold=k, kind="search").id for k in range(5)]
            means[candidate.training.learning_rate] = sum(records[i].value("validation_mse") for i in ids)
        best = chosen(SUITE, run, records)
        assert best.training.learning_rate == min(means, key=means.get) and best.id in records
    assert {record.seed for record in folds} == {0}
    bare = dataclasses.replace(SUITE, grid=())
    with pytest.raises(InputError, match="no grid"):
        search_runs(bare, bare.runs("tiny"))


def test_folds_share_no_sample_and_cover_all():
    run = SUITE.runs("tiny", 1)[0]
    held = []
    for fold in range(5):
        part = dataclasses.replace(run, fold=fold)
        (u, _), (v, _) = part.data(0)
        rows, out = ({tuple(row) for row in tensor.tolist()} for tensor in (u, v))
        assert not rows & out and len(rows) + len(out) == 60
        held.append(out)
    assert len(set.union(*held)) == 60
    with pytest.raises(InputError, match="fold must lie"):
        dataclasses.replace(run, fold=5).data(0)


def test_a_run_is_the_same_alone_and_after_another(tmp_path):
    runs = [run for run in SUITE.runs("tiny", 1) if isinstance(run, TrainingRun)]
    context = runner.Context()
    alone = [run.execute([run], context)[0].values for run in runs]
    backwards = [run.execute([run], context)[0].values for run in reversed(runs)]
    assert alone == backwards[::-1]


def test_a_device_that_no_run_can_use_is_refused_before_work(tmp_path):
    order = Order("noise-solvers", "tiny", device="cuda")
    with pytest.raises(InputError, match=r"can use the device 'cuda', only cpu; use: wellposed run noise-solvers"):
        run_suite(get_suite("noise-solvers"), order, tmp_path)
    assert not [*tmp_path.iterdir()]


class _Moved(TrainingRun):
    """Trains on the CPU and says where it was asked to."""

    seen: ClassVar[list[str]] = []

    def execute(self, runs, context):
        self.seen.append(f"{self.model.name} {context.device}")
        return super().execute(runs, dataclasses.replace(context, device="cpu"))


def test_the_device_that_was_used_is_recorded(tmp_path, monkeypatch):
    """A closed form has no use for a GPU, so that its record says CPU."""
    monkeypatch.setattr(runner, "environment", lambda device: {"device": device})
    moved = [_Moved(**{field.name: getattr(run, field.name) for field in dataclasses.fields(run)})
             for run in plan("tiny")]  # fmt: skip
    suite = dataclasses.replace(SUITE, plan=lambda scale: moved)
    lines = []
    run_suite(suite, Order("small", "tiny", seeds=1, device="cuda:0"), tmp_path, tell=lines.append)
    assert [line for line in lines if "on cpu, for it cannot use cuda:0" in line] == lines[-1:]
    assert _Moved.seen == ["implicit cuda:0", "mlp cuda:0", "linear cpu"]
    used = {record.model: record.environment["device"] for record in Store(tmp_path).records()}
    assert used == {"implicit": "cuda:0", "mlp": "cuda:0", "linear": "cpu"}


def test_a_suite_says_what_its_scale_paper_differs_in(tmp_path):
    lines = []
    tiny = dataclasses.replace(SUITE, plan=lambda scale: plan("tiny"), seeds={"tiny": 1, "paper": 1})
    suite = dataclasses.replace(tiny, differs="The batches are larger.")
    run_suite(suite, Order("small", "paper"), tmp_path / "one", tell=lines.append)
    assert lines[0] == "small: the scale paper is not quite as published: The batches are larger."
    for order, said in ((Order("small", "tiny"), suite), (Order("small", "paper"), tiny)):
        lines.clear()
        run_suite(said, order, tmp_path / "two", tell=lines.append)
        assert not any("as published" in line for line in lines)
    told = {name: suite.differs for name, suite in all_suites().items() if suite.differs}
    assert all_suites().keys() - told.keys() == {"parameters", "bisection-rates"}
    assert all(is_sentence(text) for text in told.values())


def test_widths_of_equal_weights(sizes):
    (widths,) = [record for record in sizes if record.model == "deq"]
    assert [widths.value("state_width", layers) for layers in (1, 3, 9, 13)] == [128, 223, 386, 464]


@dataclass(frozen=True)
class Watched(Context):
    """Counts how often a checkpoint is asked for."""

    asked: list = dataclasses.field(default_factory=list)

    def checkpoint(self, runs):
        self.asked.append(runs)
        return None


KINDS = {
    type(run): run
    for suite in ("activations", "beyond", "noise-regression", "noise-solvers", "prefix-sums")
    for run in reversed(get_suite(suite).plan("tiny"))
    if getattr(run, "trained", True)
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_is_called_resumable_has_a_checkpoint(kind):
    context = Watched()
    KINDS[kind].execute([KINDS[kind]], context)
    assert bool(context.asked) == kind.resumable


def test_an_interruption_says_what_it_leaves():
    assert SUITE.resumable() and not get_suite("depth").resumable() and not get_suite("bounds").resumable()
    progress = runner.Progress(Order("small"), 3, 1, 0, begun=0)
    assert progress.after_interruption == "finished runs are kept"
    assert "last epoch" in dataclasses.replace(progress, begun=1).after_interruption
