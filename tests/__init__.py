"""The tests of ztrans: a folder for each package, the laws, and what several of them use (`support`)."""
