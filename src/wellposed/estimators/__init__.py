"""scikit-learn estimators whose prediction is a fixed point."""

from wellposed.estimators.sequences import ImplicitSequenceClassifier, ImplicitSequenceRegressor
from wellposed.estimators.tables import ImplicitClassifier, ImplicitRegressor

__all__ = [
    "ImplicitClassifier",
    "ImplicitRegressor",
    "ImplicitSequenceClassifier",
    "ImplicitSequenceRegressor",
]
