"""Train one model with ztrans and with other libraries, on the same data and network. See __main__.py."""
