"""When ``x = phi(Ax + v)`` is well-posed: conditions by name, certificates, projections and error bounds."""

from wellposed.conditions.certificate import Certificate
from wellposed.conditions.conditions import CONDITIONS, Condition, certificate, certify
from wellposed.conditions.projections import project_rows

__all__ = ["CONDITIONS", "Certificate", "Condition", "certificate", "certify", "project_rows"]
