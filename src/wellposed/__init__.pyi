# The public names, each spelt once: type checkers read this file, and `__init__.py` imports from it on first use.

from wellposed import (
    activations as activations,
)
from wellposed import (
    compat as compat,
)
from wellposed import (
    conditions as conditions,
)
from wellposed import (
    convert as convert,
)
from wellposed import (
    convex as convex,
)
from wellposed import (
    data as data,
)
from wellposed import (
    equilibrium as equilibrium,
)
from wellposed import (
    errors as errors,
)
from wellposed import (
    forms as forms,
)
from wellposed import (
    kernels as kernels,
)
from wellposed import (
    models as models,
)
from wellposed import (
    robust as robust,
)
from wellposed import (
    training as training,
)
from wellposed.conditions import (
    Certificate as Certificate,
)
from wellposed.conditions import (
    certificate as certificate,
)
from wellposed.convert import to_implicit as to_implicit
from wellposed.convex import (
    States as States,
)
from wellposed.convex import (
    eliminate_features as eliminate_features,
)
from wellposed.convex import (
    fit_states as fit_states,
)
from wellposed.convex import (
    record_states as record_states,
)
from wellposed.equilibrium import (
    Absolute as Absolute,
)
from wellposed.equilibrium import (
    Anderson as Anderson,
)
from wellposed.equilibrium import (
    Broyden as Broyden,
)
from wellposed.equilibrium import (
    ErrorBound as ErrorBound,
)
from wellposed.equilibrium import (
    Implicit as Implicit,
)
from wellposed.equilibrium import (
    MeanRelative as MeanRelative,
)
from wellposed.equilibrium import (
    Newton as Newton,
)
from wellposed.equilibrium import (
    Phantom as Phantom,
)
from wellposed.equilibrium import (
    Picard as Picard,
)
from wellposed.equilibrium import (
    RandomSteps as RandomSteps,
)
from wellposed.equilibrium import (
    Relative as Relative,
)
from wellposed.equilibrium import (
    Solution as Solution,
)
from wellposed.equilibrium import (
    Solver as Solver,
)
from wellposed.equilibrium import (
    Status as Status,
)
from wellposed.equilibrium import (
    Steps as Steps,
)
from wellposed.equilibrium import (
    Stopping as Stopping,
)
from wellposed.equilibrium import (
    Unrolled as Unrolled,
)
from wellposed.equilibrium import (
    fixed_point as fixed_point,
)
from wellposed.equilibrium import (
    watch as watch,
)
from wellposed.estimators import (
    ImplicitClassifier as ImplicitClassifier,
)
from wellposed.estimators import (
    ImplicitRegressor as ImplicitRegressor,
)
from wellposed.estimators import (
    ImplicitSequenceClassifier as ImplicitSequenceClassifier,
)
from wellposed.estimators import (
    ImplicitSequenceRegressor as ImplicitSequenceRegressor,
)
from wellposed.forms import (
    add as add,
)
from wellposed.forms import (
    feedback as feedback,
)
from wellposed.forms import (
    parallel as parallel,
)
from wellposed.forms import (
    product as product,
)
from wellposed.forms import (
    series as series,
)
from wellposed.forms import (
    spy as spy,
)
from wellposed.models import (
    DEQ as DEQ,
)
from wellposed.models import (
    Ensemble as Ensemble,
)
from wellposed.models import (
    ImplicitForm as ImplicitForm,
)
from wellposed.models import (
    ImplicitModel as ImplicitModel,
)
from wellposed.models import (
    ImplicitRNN as ImplicitRNN,
)
from wellposed.models import (
    MultiscaleDEQ as MultiscaleDEQ,
)
from wellposed.models import (
    Noise as Noise,
)
from wellposed.models import (
    Noisy as Noisy,
)
from wellposed.models import (
    export_onnx as export_onnx,
)
from wellposed.models import (
    fixed_steps as fixed_steps,
)
from wellposed.models import (
    from_pretrained as from_pretrained,
)
from wellposed.models import (
    load as load,
)
from wellposed.models import (
    save as save,
)
from wellposed.models import (
    save_pretrained as save_pretrained,
)
from wellposed.robust import (
    Box as Box,
)
from wellposed.robust import (
    SparseBox as SparseBox,
)
from wellposed.training import fit as fit

__version__: str
__all__: list[str]
