"""Small mutations of the code, each of which the nearest tests must notice: `make mutants`."""
