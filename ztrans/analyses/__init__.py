"""What a program is made of: questions that several transforms ask."""
