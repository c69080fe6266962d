"""When each collective of a program starts, which share a message, and what is kept: cost, plan, order."""
