"""How the arguments of a step become the flat tensors of a program."""
