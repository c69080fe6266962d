"""Show timelines: as text, as a picture, as a page of HTML, as a trace for Perfetto."""
