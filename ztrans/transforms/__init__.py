"""The transforms, one file each, and in `base` the class of all transforms."""
