"""Implicit models as matrices and operators."""

from wellposed.forms.block import Block
from wellposed.forms.convolution import Convolution
from wellposed.forms.form import ImplicitForm
from wellposed.forms.operator import Operator, Product, Sparse, Sum
from wellposed.forms.operators import Dense, Diagonal, Identity, LowRank, Zero
from wellposed.forms.repeated import Repeated
from wellposed.forms.selection import Selection

__all__ = [
    "Block",
    "Convolution",
    "Dense",
    "Diagonal",
    "Identity",
    "ImplicitForm",
    "LowRank",
    "Operator",
    "Product",
    "Repeated",
    "Selection",
    "Sparse",
    "Sum",
    "Zero",
]
