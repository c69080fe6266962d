"""The transforms, a file for each. `base` has their class; `edits`, `reduce_once` and `cast_on_shards` serve some."""
