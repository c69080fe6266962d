"""The program: a typed, functional, straight-line graph; how it prints, is checked, and what it means."""
