"""Calls of other libraries, answered by this one."""

from wellposed.compat import torchdeq

__all__ = ["torchdeq"]
