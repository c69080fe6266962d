"""ztrans and its peers on one model, one data set and one network. See __main__.py."""
