"""Hosts: where the ranks of a group are, and which way the bytes of a collective take between them."""

from .placement import Hosts, common, hosts_of
from .route import EXCHANGE, RING, TWO_LEVELS, Route, route_of
