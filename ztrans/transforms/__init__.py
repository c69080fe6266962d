"""The transforms, a file for each. `base` has their class; `edits`, `reduce_once`, `scaled_casts` serve several."""
