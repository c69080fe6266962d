"""Write a state to files while steps go on, and read it in the layouts of a step."""
