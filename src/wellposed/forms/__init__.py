"""Implicit models as matrices and operators."""

from wellposed.forms.compose import add, concatenate, linear, parallel, product, product_lipschitz, series
from wellposed.forms.draw.diagram import graph
from wellposed.forms.draw.spy import spy
from wellposed.forms.feedback import feedback, small_gain
from wellposed.forms.form import ImplicitForm
from wellposed.forms.gains import gains
from wellposed.forms.operators.base import Operator, Product, Sparse, Sum
from wellposed.forms.operators.block import Block
from wellposed.forms.operators.plain import Dense, Diagonal, Identity, LowRank, Repeated, Zero
from wellposed.forms.operators.structured import Convolution, Selection
from wellposed.forms.rearrange import absorb_output_bias, block_triangular, cap_rows, permute, permute_states, trim

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
    "absorb_output_bias",
    "add",
    "block_triangular",
    "cap_rows",
    "concatenate",
    "feedback",
    "gains",
    "graph",
    "linear",
    "parallel",
    "permute",
    "permute_states",
    "product",
    "product_lipschitz",
    "series",
    "small_gain",
    "spy",
    "trim",
]
