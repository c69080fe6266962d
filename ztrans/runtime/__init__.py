"""Running a program: generated code for one rank, its collectives, and what the ranks must agree on."""
