"""The transforms, one file each; `base` says what a transform is."""
