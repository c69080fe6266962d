"""Timelines for people: as text, as a picture, as a page, as a trace."""
