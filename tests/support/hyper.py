"""A module of settings, such as a training script imports."""

factor = 2.0


class Config:
    decay = 0.5


def scaled(x):
    return x * factor
