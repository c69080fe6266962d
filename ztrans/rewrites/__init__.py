"""Rewrites of programs that transforms, plans and backends share, and the tool that they are written with."""
