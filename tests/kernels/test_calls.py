"""How many files of the package a call passes through: a measure of how many hops a reader must follow."""

import sys
from pathlib import Path

import torch

import wellposed
from wellposed import ImplicitModel

PACKAGE = Path(wellposed.__file__).parent


def files_passed(call):
    """Returns the files of the package whose functions run during a call, sorted."""
    names = set()

    def note(frame, event, argument):
        if event == "call":
            names.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return sorted(str(Path(name).relative_to(PACKAGE)) for name in names if Path(name).is_relative_to(PACKAGE))


def test_a_model_passes_few_files():
    ImplicitModel(3, 2, 8)(torch.zeros(5, 3))  # imports and compiles
    model, u = ImplicitModel(3, 2, 8), torch.zeros(5, 3)
    first, later = files_passed(lambda: model(u)), files_passed(lambda: model(u))
    assert len(first) <= 16, first
    assert len(later) <= 6, later
