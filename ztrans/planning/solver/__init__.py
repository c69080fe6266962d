"""The scheduling problem without the program: its data, its schedules, a search for good ones, a bound."""
