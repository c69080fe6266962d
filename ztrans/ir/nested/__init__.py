"""Equations of higher-order operators, which call functions: sub-programs among their arguments."""
