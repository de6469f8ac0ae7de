"""Networks made sparse by convex programs, and inputs that can be left out (003)."""

from wellposed_lab.experiments.sparsify import cifar, digits, eliminate_fashion, fashion, newsgroups, row_solvers

SUITES = (
    digits.SUITE,
    fashion.SUITE,
    cifar.SUITE,
    newsgroups.SUITE,
    eliminate_fashion.SUITE,
    row_solvers.RATES,
)
