"""A module of settings, as a training script imports one."""

factor = 2.0


class Config:
    decay = 0.5


def scaled(x):
    return x * factor
