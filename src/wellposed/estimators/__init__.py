"""scikit-learn estimators whose prediction is a fixed point."""

from wellposed.estimators.targets import (
    ImplicitClassifier,
    ImplicitRegressor,
    ImplicitSequenceClassifier,
    ImplicitSequenceRegressor,
)

__all__ = [
    "ImplicitClassifier",
    "ImplicitRegressor",
    "ImplicitSequenceClassifier",
    "ImplicitSequenceRegressor",
]
