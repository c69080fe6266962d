"""Output for users: timelines as text, pictures, pages and traces; the progress of a step; and tracebacks."""
