"""Hosts: on which host a process runs, and messages that are summed inside a host before they leave it."""
