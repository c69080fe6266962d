# These modules import cosmic-ray, which `make mutants` installs and the tests do not need.
collect_ignore = ["__main__.py", "mutations.py"]
