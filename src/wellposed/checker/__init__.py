"""The checker of certificates: exact arithmetic on the standard library, and nothing of the code it checks."""

from wellposed.checker.check import Finding, certificate_path, check
from wellposed.checker.tensors import RefusedError

__all__ = ["Finding", "RefusedError", "certificate_path", "check"]
