"""Implicit models as matrices and operators."""

from wellposed.forms.arrange import block_triangular, permute, permute_states
from wellposed.forms.block import Block
from wellposed.forms.compose import add, concatenate, linear, parallel, series
from wellposed.forms.convolution import Convolution
from wellposed.forms.feedback import feedback, small_gain
from wellposed.forms.form import ImplicitForm
from wellposed.forms.gain import gains
from wellposed.forms.graph import graph
from wellposed.forms.operator import Operator, Product, Sparse, Sum
from wellposed.forms.operators import Dense, Diagonal, Identity, LowRank, Zero
from wellposed.forms.product import product, product_lipschitz
from wellposed.forms.repeated import Repeated
from wellposed.forms.selection import Selection
from wellposed.forms.spy import spy
from wellposed.forms.trim import trim

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
    "add",
    "block_triangular",
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
