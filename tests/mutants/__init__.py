"""Small mutations of the code. The nearest tests must notice each of them: `make mutants`."""
