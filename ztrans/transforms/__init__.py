"""The transforms, a file for each. `base` has their class; `edits`, `reduce_once`, `scaled_casts` are parts of some."""
