# The public names, each spelt once: type checkers read this file, and `__init__.py` imports from it on first use.
# ruff: noqa: I001 (one import a module; the sorted form has one a name)

from wellposed import (
    activations as activations,
    compat as compat,
    conditions as conditions,
    convert as convert,
    convex as convex,
    data as data,
    equilibrium as equilibrium,
    errors as errors,
    forms as forms,
    kernels as kernels,
    models as models,
    robust as robust,
    training as training,
)
from wellposed.conditions import Certificate as Certificate, certificate as certificate
from wellposed.convert import to_implicit as to_implicit
from wellposed.convex import (
    States as States,
    eliminate_features as eliminate_features,
    fit_states as fit_states,
    record_states as record_states,
)
from wellposed.equilibrium import (
    Absolute as Absolute,
    Anderson as Anderson,
    Broyden as Broyden,
    ErrorBound as ErrorBound,
    Implicit as Implicit,
    MeanRelative as MeanRelative,
    Newton as Newton,
    Phantom as Phantom,
    Picard as Picard,
    RandomSteps as RandomSteps,
    Relative as Relative,
    Solution as Solution,
    Solver as Solver,
    Status as Status,
    Steps as Steps,
    Stopping as Stopping,
    Unrolled as Unrolled,
    fixed_point as fixed_point,
)
from wellposed.estimators import ImplicitClassifier as ImplicitClassifier, ImplicitRegressor as ImplicitRegressor
from wellposed.forms import (
    add as add,
    feedback as feedback,
    parallel as parallel,
    product as product,
    series as series,
)
from wellposed.models import (
    DEQ as DEQ,
    ImplicitForm as ImplicitForm,
    ImplicitModel as ImplicitModel,
    ImplicitRNN as ImplicitRNN,
    MultiscaleDEQ as MultiscaleDEQ,
    Noise as Noise,
    export_onnx as export_onnx,
    load as load,
    save as save,
)
from wellposed.robust import Box as Box, SparseBox as SparseBox
from wellposed.training import fit as fit

__version__: str
__all__: list[str]
