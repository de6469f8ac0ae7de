"""Implicit models as matrices and operators."""

from wellposed.forms.form import ImplicitForm
from wellposed.forms.operators import Dense, LowRank, Operator, Sparse, Zero

__all__ = ["Dense", "ImplicitForm", "LowRank", "Operator", "Sparse", "Zero"]
