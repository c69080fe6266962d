"""The scheduling problem without the program: its data, its schedules, a search for fast ones, a lower bound."""
