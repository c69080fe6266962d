"""Check your own transforms against the laws of ztrans, on a step of your choice."""

from .laws import LawError, check_laws

__all__ = ["LawError", "check_laws"]
