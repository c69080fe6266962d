"""Programs compiled by Inductor: which equations run as one kernel, and how values lie in memory."""
