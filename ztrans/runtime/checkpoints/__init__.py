"""Save a state to files while steps go on, and load it in the layouts of a step."""
